"""What must hold in a handoff world: always, and when nothing more can happen."""

from __future__ import annotations

from tests.handoff_scene import Prefill, Request, Scene, token_of

COPY_S = 0.02
"""How long the kernel may go on with a copy into pages that a fence has moved (handoff.md)."""


def check(scene: Scene) -> None:
    """Assert what must hold after everything that happens."""
    _what_may_land_belongs_to_its_attempt(scene)
    _blocks_are_where_their_attempts_are(scene)
    _sources_are_held(scene)
    _emitted_tokens_are_right(scene)


def is_over(scene: Scene) -> bool:
    """Return whether nothing waits for time to pass."""
    running = (prefill for prefill in scene.prefills.values() if prefill.runs)
    return (
        all(request.result for request in scene.requests.values())
        and not scene.quarantine.entries
        and not any(prefill.sides or prefill.held for prefill in running)
    )


def check_end(scene: Scene) -> None:
    """Assert what must hold when nothing more can happen."""
    for request in scene.requests.values():
        _is_answered(scene, request)
    assert not scene.quarantine.entries, "a quarantine never ended"
    for number, block in scene.blocks.items():
        assert block.state == "free", f"block {number} stays {block.state}"
    for prefill in scene.prefills.values():
        if prefill.runs:
            _has_let_go(prefill)


def _what_may_land_belongs_to_its_attempt(scene: Scene) -> None:
    is_copying = scene.now < scene.moved_at + COPY_S
    oldest = scene.generation - is_copying
    for write in scene.writes.values():
        if write.note.generation < oldest:
            continue
        for number, _ in write.left:
            state, owner, _ = scene.blocks[number]
            assert state in ("reserved", "quarantined"), f"a write may land in a {state} block"
            assert owner == write.note.handoff, "a write may land in another attempt's block"


def _blocks_are_where_their_attempts_are(scene: Scene) -> None:
    for number, (state, owner, _) in scene.blocks.items():
        if state == "reserved":
            assert owner in scene.tables, f"block {number} is lost"
            assert number in scene.tables[owner], f"block {number} is lost"
        elif state == "quarantined":
            assert owner in scene.quarantine.entries, f"block {number} is never freed"


def _sources_are_held(scene: Scene) -> None:
    for (handoff, _), write in scene.writes.items():
        prefill = scene.prefills[write.writer]
        if write.left and not write.is_cut and prefill.died_at is None:
            held = prefill.held.get(handoff, ())
            assert set(write.sources) <= set(held), "a write reads blocks that were let go of"


def _emitted_tokens_are_right(scene: Scene) -> None:
    for request_id, request in scene.requests.items():
        for sample, token in request.emitted.items():
            assert token == token_of(request_id, sample), "a wrong token was emitted"


def _is_answered(scene: Scene, request: Request) -> None:
    assert request.result, "a request never ended"
    if request.result == "joined":
        samples = set(range(request.side.request.sampling.n))
        assert request.emitted.keys() | request.aborted == samples, "a token is missing"
    if not (scene.num_faults or scene.num_aborts):
        assert request.result == "joined", "a request was lost without a fault"
    if not scene.num_faults:
        assert not scene.generation, "a fence without a fault"


def _has_let_go(prefill: Prefill) -> None:
    assert not prefill.sides, "an attempt never ended at prefill"
    assert not prefill.held, "prefill's blocks are never let go of"
    assert not prefill.computing, "prefill computes for nobody"
