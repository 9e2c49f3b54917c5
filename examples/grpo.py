"""What configs/grpo.py reads: prompts, and a reward of the answers to them.

python examples/grpo.py > brackets.jsonl
python train.py configs/grpo.py --run.init_from runs/quickstart

The prompts are beginnings of Python that leave brackets open. The reward of an answer is the
fraction of the brackets of both that have a partner.
"""

import json
from collections.abc import Sequence

PAIRS = {")": "(", "]": "[", "}": "{"}
CALLS = ("print", "len", "sorted", "sum", "self.add", "os.path.join", "dict", "range")
BEGINNINGS = [f"x = {a}({b}(self.items[" for a in CALLS for b in CALLS]


def reward(text: str) -> float:
    """The fraction of the brackets of a text that have a partner; 0 without brackets."""
    waiting, matched, count = list[str](), 0, 0
    for character in text:
        if character in PAIRS.values():
            waiting.append(character)
            count += 1
        elif character in PAIRS:
            count += 1
            if waiting and waiting[-1] == PAIRS[character]:
                waiting.pop()
                matched += 2
    return matched / max(count, 1)


def rewards_of(
    prompts: Sequence[str], answers: Sequence[str], targets: Sequence[str]
) -> list[float]:
    return [reward(prompt + answer) for prompt, answer in zip(prompts, answers, strict=True)]


if __name__ == "__main__":
    for beginning in BEGINNINGS:
        print(json.dumps({"prompt": beginning}))
