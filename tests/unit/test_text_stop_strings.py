"""Stop strings: what leaves, and when."""

from __future__ import annotations

import pytest

from router.text.stop_strings import StopMatcher


def test_without_stops_everything_leaves() -> None:
    matcher = StopMatcher(())
    assert matcher.feed("abc") == "abc"
    assert matcher.flush() == ""


def test_holds_back_only_a_possible_prefix() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.feed("the E") == "the "
    assert matcher.feed("N") == ""
    assert matcher.feed("gine") == "ENgine"
    assert matcher.matched is None
    assert matcher.flush() == ""


def test_matches_across_pieces() -> None:
    matcher = StopMatcher(["END"])
    assert [matcher.feed(piece) for piece in ("a", "bE", "N", "Dx", "y")] == ["a", "b", "", "", ""]
    assert matcher.matched == "END"
    assert matcher.flush() == ""


def test_includes_the_stop_string_on_wish() -> None:
    matcher = StopMatcher(["END"], include_in_output=True)
    assert matcher.feed("aE") + matcher.feed("NDx") == "aEND"


def test_the_first_to_be_complete_wins() -> None:
    matcher = StopMatcher(["cde", "bcdef"])
    assert matcher.feed("abcdefg") == "ab"
    assert matcher.matched == "cde"


def test_of_two_complete_at_once_the_longer_begins_first() -> None:
    matcher = StopMatcher(["b", "ab"])
    assert matcher.feed("xab") == "x"
    assert matcher.matched == "ab"


def test_overlapping_prefixes_are_kept() -> None:
    matcher = StopMatcher(["aab"])
    assert matcher.feed("aa") == ""
    assert matcher.feed("a") == "a"
    assert matcher.feed("b") == ""
    assert matcher.matched == "aab"


def test_a_stop_in_the_first_piece() -> None:
    matcher = StopMatcher(["\n"])
    assert matcher.feed("\n") == ""
    assert matcher.matched == "\n"


def test_flush_returns_what_was_held() -> None:
    matcher = StopMatcher(["END"])
    matcher.feed("EN")
    assert matcher.flush() == "EN"


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_pieces_of_any_size_release_the_same(size: int) -> None:
    text = "so it goes, and STOpping at STOP, done"
    matcher = StopMatcher(["STOP", "TOPp!"])
    released = "".join(matcher.feed(text[at : at + size]) for at in range(0, len(text), size))
    assert released == "so it goes, and STOpping at "
