"""Scripts of tests that run on eight forced host devices, in a process of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Of a test whose report the script makes without the argument "slow" alone.
only_most_used = pytest.mark.parametrize("report", ["most used"], indirect=True)


def on_eight_devices(script, *arguments):
    """What a script of this folder prints, as JSON."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    changes = {"XLA_FLAGS": flags, "PYTHONPATH": f"{HERE}:{HERE.parent}"}
    command = [sys.executable, HERE / script, *arguments]
    done = subprocess.run(command, env=os.environ | changes, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)
