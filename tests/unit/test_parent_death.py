"""A child that asks the kernel to be killed with its parent."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from deploy.launcher import parent_death

CHILD = """
import sys
from deploy.launcher.parent_death import die_with_parent
die_with_parent(int(sys.argv[1]))
print("lives")
"""


@pytest.mark.parametrize(("is_ours", "said"), [(True, "lives\n"), (False, "")])
def test_a_child_whose_launcher_died_before_it_asked_ends_at_once(is_ours: bool, said: str) -> None:
    """Its parent is another one by then, which will not end."""
    parent = os.getpid() if is_ours else os.getppid()
    command = [sys.executable, "-c", CHILD, str(parent)]
    child = subprocess.run(command, check=True, capture_output=True, text=True)
    assert child.stdout == said


def test_a_kernel_that_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is not killed with its launcher would be left."""
    monkeypatch.setattr(parent_death, "_PR_SET_PDEATHSIG", -1)
    with pytest.raises(OSError, match=r"prctl\(PR_SET_PDEATHSIG\): Invalid argument"):
        parent_death.die_with_parent(os.getppid())
