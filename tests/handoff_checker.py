"""An explicit-state model checker of handoffs: breadth first, every interleaving, within bounds.

From the first state on, everything that may happen is tried in every state that was not seen
before, so the first violation found has a shortest path. It looks for

- a violated invariant in any state;
- a state in which nothing happens any more, though somebody still waits;
- a livelock: a circle of steps of which none is a fault or a matter of chance. Without one, every
  handoff comes to its end, whatever the order.

Time passes by itself only where nothing else happens; at any other moment that is a fault ("slow"),
counted like all faults.
"""

from __future__ import annotations

import gc
from array import array
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from tests.handoff_faults import IDLE_S
from tests.handoff_fingerprint import Fingerprint, Fingerprints
from tests.handoff_invariants import check, check_end, is_over
from tests.handoff_scene import BLOCK, DEADLINE_S, Action
from tests.handoff_world import HandoffWorld

ABORTS = ("abort", "abort a sample")


class Bounds(msgspec.Struct, frozen=True):
    """How much may happen.

    Attributes:
        num_tokens: of the prompt; blocks have 4.
        ends: one a sample: whether its first token ends it.
        num_cached: blocks that decode holds already.
        num_blocks: of decode's pool.
        chunk_tokens: that prefill computes in a step.
        num_prefills: candidates, asked in order.
        faults: kinds that may happen, `max_faults` of them together; each of `ABORTS` that is
            named counts for itself, `max_aborts` together.
    """

    name: str
    faults: tuple[str, ...] = ()
    max_faults: int = 1
    max_aborts: int = 1
    num_tokens: int = 8
    ends: tuple[bool, ...] = (False,)
    num_cached: int = 0
    num_blocks: int = 6
    chunk_tokens: int = BLOCK
    num_prefills: int = 1
    allow_local: bool = True
    deadline_s: float = DEADLINE_S

    def first(self) -> HandoffWorld:
        """Return the first state: the request has come."""
        world = HandoffWorld(
            num_blocks=self.num_blocks,
            chunk_tokens=self.chunk_tokens,
            num_prefills=self.num_prefills,
        )
        world.start(
            self.num_tokens,
            list(self.ends),
            allow_local=self.allow_local,
            num_cached=self.num_cached,
            deadline_s=self.deadline_s,
        )
        return world


class ViolationError(AssertionError):
    """A state that must not be, and a shortest way to it."""

    def __init__(self, what: str, path: list[Action]) -> None:
        self.what = what
        self.path = path
        steps = "\n".join(f"  {number}. {action}" for number, action in enumerate(path, 1))
        super().__init__(f"{what}, after\n{steps}")


@dataclass
class Reach:
    """What was looked at."""

    name: str
    num_states: int = 0
    num_transitions: int = 0
    depth: int = 0
    longest: int = 0
    num_ends: int = 0

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.num_states:,} states, {self.num_transitions:,} transitions, "
            f"depth {self.depth}, {self.num_ends:,} ends, at most {self.longest} steps to one"
        )


@dataclass(frozen=True)
class _Node:
    number: int
    world: HandoffWorld


@contextmanager
def _no_collector() -> Generator[None]:
    """Keep Python from looking for circles of references again and again: worlds have none, and
    among a hundred thousand of them the looking took half of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class HandoffChecker:
    """One exploration."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._aborts = tuple(kind for kind in bounds.faults if kind in ABORTS)
        self._faults = tuple(kind for kind in bounds.faults if kind not in ABORTS)
        self._fingerprints = Fingerprints()
        self._number_of: dict[Fingerprint, int] = {}
        self._came_from = array("l")
        self._came_by: list[Action] = []
        self._steps = (array("l"), array("l"))  # from, to: those that happen sooner or later
        self.reach = Reach(bounds.name)

    def run(self, max_depth: int | None = None) -> Reach:
        """Look at every state, or at those within `max_depth` steps (for circles only if all are).

        Raises:
            ViolationError: the first that was found.
        """
        layer = [self._first()]
        with _no_collector():
            while layer and self.reach.depth != max_depth:
                self.reach.depth += 1
                layer = [new for node in layer for new in self._expand(node)]
                self._fingerprints.forget_parts()
        self.reach.num_states = len(self._number_of)
        if not layer:
            self.reach.longest = self._longest_way()
        return self.reach

    def _first(self) -> _Node:
        world = self._bounds.first()
        self._number_of[self._fingerprints.of(world.scene)] = 0
        self._came_from.append(-1)
        self._came_by.append(Action("start"))
        return _Node(0, world)

    def _expand(self, node: _Node) -> Iterator[_Node]:
        sure = self._sure_actions(node)
        for action in sure:
            yield from self._go(node, action, is_sure=True)
        for action in node.world.chances():
            yield from self._go(node, action)
        for action in self._faults_left(node.world):
            yield from self._go(node, action)

    def _sure_actions(self, node: _Node) -> list[Action]:
        actions = node.world.actions()
        if actions:
            return actions
        if not is_over(node.world.scene):
            return [Action("pass_time", (IDLE_S,))]
        self.reach.num_ends += 1
        scene = node.world.scene
        try:
            check_end(scene)
            in_time = scene.now < self._bounds.deadline_s or self._bounds.deadline_s < DEADLINE_S
            assert in_time, "nothing but its deadline ended the request"
        except AssertionError as error:
            raise ViolationError(str(error), self._path(node.number)) from error
        return []

    def _faults_left(self, world: HandoffWorld) -> Iterator[Action]:
        left = [
            *(self._faults if world.scene.num_faults < self._bounds.max_faults else ()),
            *(self._aborts if world.scene.num_aborts < self._bounds.max_aborts else ()),
        ]
        if left:
            possible = world.faults.possible()
            for kind in left:
                yield from (Action(kind, (action,)) for action in possible[kind])

    def _go(self, node: _Node, action: Action, *, is_sure: bool = False) -> Iterator[_Node]:
        """Take one step; yields where it leads if that is new."""
        world = node.world.copy()
        try:
            self._perform(world, action)
            check(world.scene)
        except (AssertionError, KeyError) as error:
            raise ViolationError(str(error), [*self._path(node.number), action]) from error
        self.reach.num_transitions += 1
        number = len(self._number_of)
        known = self._number_of.setdefault(self._fingerprints.of(world.scene), number)
        if is_sure:
            self._steps[0].append(node.number)
            self._steps[1].append(known)
        if known == number:
            self._came_from.append(node.number)
            self._came_by.append(action)
            yield _Node(number, world)

    def _perform(self, world: HandoffWorld, action: Action) -> None:
        if action.kind in self._aborts:
            world.scene.num_aborts += 1
        elif action.kind in self._faults:
            world.scene.num_faults += 1
        else:
            world.perform(action)
            return
        world.perform(action.args[0])

    def _path(self, number: int) -> list[Action]:
        path: list[Action] = []
        while number > 0:
            path.append(self._came_by[number])
            number = self._came_from[number]
        return path[::-1]

    def _longest_way(self) -> int:
        """Return the length of the longest way to an end by what happens sooner or later.

        Takes away states from which every such step leads to what was taken away before (Kahn's
        topological order); what remains goes round in circles.
        """
        before: list[list[int]] = [[] for _ in self._came_from]
        num_after = [0] * len(before)
        for start, end in zip(*self._steps, strict=True):
            before[end].append(start)
            num_after[start] += 1
        ways = [0] * len(before)
        ready = [number for number, num in enumerate(num_after) if not num]
        num_taken = 0
        while ready:
            end = ready.pop()
            num_taken += 1
            for start in before[end]:
                ways[start] = max(ways[start], ways[end] + 1)
                num_after[start] -= 1
                if not num_after[start]:
                    ready.append(start)
        if num_taken < len(before):
            stuck = next(number for number, num in enumerate(num_after) if num)
            msg = "it may go round in circles for ever"
            raise ViolationError(msg, self._path(stuck))
        return max(ways)
