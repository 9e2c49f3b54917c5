"""`jaxformer plan CONFIG`: what a run needs of its devices, and the least time it can take, before
it starts."""

import json
import math
import os
from dataclasses import asdict, replace

import jax

from jaxformer.arrays.hardware import name_of
from jaxformer.cli.arguments import PlanArguments
from jaxformer.config.run import RunConfig
from jaxformer.runs.model_files import ModelFiles
from jaxformer.runs.objectives import with_chats
from jaxformer.tools.plan import make_plan, plan_numbers, plan_text
from jaxformer.tools.plan_compiled import compiled_report, parse_target
from jaxformer.tools.plan_memory import planned_run


def run(args: PlanArguments, config: RunConfig) -> int:
    name = args.device
    devices = args.devices
    if args.compile and not name:
        # Before the plan is made: a wrong name should not cost a minute.
        target = parse_target(args.compile)
        name = target.kind
        devices = devices or target.size
    elif not name:
        # Those of this machine where they are accelerators of the table, or a cpu.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        name = name_of(jax.devices()[0].device_kind) or "cpu"
        if not devices and name != "cpu" and not math.prod(config.mesh.sizes.values()):
            devices = jax.device_count()
    config = replace(config, data=with_chats(config.model, config.data))
    planned = planned_run(config, name, devices)
    # config.json is enough for a plan.
    base = ModelFiles(config.run.init_from)
    is_new = config.run.init_from and base.or_begun(config.run) is base
    if is_new and base.lacks_weights:
        note = f"the model is that of config.json in {base}, which has no weights; a run needs them"
        planned = replace(planned, notes=(*planned.notes, note))
    plan = make_plan(planned)
    compiled = None
    if args.compile:
        compiled = compiled_report(config, args.compile, plan.planned.packed)
    if args.json:
        numbers = plan_numbers(plan)
        if compiled is not None:
            numbers["compiled"] = asdict(compiled)
        print(json.dumps(numbers, indent=1))
        return 0
    print(plan_text(plan, f"plan of {args.config}"))
    if compiled is not None:
        print("\n".join(["", *compiled.lines()]))
    return 0
