"""Run on eight forced host devices: three steps with an embedding, a sublayer and an objective from
outside the package, on one device and on a mesh. Prints JSON for test_extension_parts.py."""

import json

import own_embedding
import own_objective
import own_sublayer

import jaxformer as jf
from jaxformer.layers.block import MIXERS
from jaxformer.layers.embed import EMBEDDINGS
from jaxformer.runs.objectives import OBJECTIVES


def main():
    MIXERS["mean"] = own_sublayer.ROW
    EMBEDDINGS["narrow"] = own_embedding.ROW
    OBJECTIVES[own_objective.NAME] = own_objective.ROW
    mesh, report = jf.make_mesh(data=2, fsdp=2, tensor=2), {}
    for own in (own_sublayer, own_embedding, own_objective):
        found, params = own.losses(3, mesh)
        report[own.__name__] = {"one": own.losses(3)[0], "mesh": found}
    second = params["objective"][own_objective.NAME]["weight"]
    print(json.dumps(report | {"shard": second.sharding.shard_shape(second.shape)}))


if __name__ == "__main__":
    main()
