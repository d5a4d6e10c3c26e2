"""core.config: the loader refuses by name, with the value and what would be right."""

from __future__ import annotations

import pytest

from core.config import Config, load
from core.errors import ConfigError


def test_nothing_given_is_all_defaults() -> None:
    assert load({}) == Config()


def test_file_and_overrides_reach_their_fields() -> None:
    config = load(
        {"engine": {"chunk_tokens": 64}, "http": {"allow_origins": ["http://a"]}},
        {"engine.block_size": "8", "api.keys": "one, two", "kv_transfer.poll_s": "0.5"},
    )
    assert (config.engine.chunk_tokens, config.engine.block_size) == (64, 8)
    assert config.http.allow_origins == ("http://a",)
    assert config.api.keys == ("one", "two")
    assert config.kv_transfer.poll_s == 0.5


@pytest.mark.parametrize("text", ["one,t w", '["one", "t w"]', " ['one', 't w'] "])
@pytest.mark.parametrize("field", ["api.keys", "http.allow_origins"])
def test_an_override_may_be_a_toml_list(field: str, text: str) -> None:
    section, key = field.split(".")
    assert getattr(getattr(load({}, {field: text}), section), key) == ("one", "t w")
    assert getattr(getattr(load({}, {field: "[]"}), section), key) == ()


def test_an_override_may_be_true_or_false() -> None:
    for text, value in (("true", True), ("false", False)):
        assert load({}, {"kv_transfer.verify": text}).kv_transfer.verify is value


def test_override_wins_over_the_file() -> None:
    assert load({"http": {"port": 1}}, {"http.port": "2"}).http.port == 2


def test_whole_number_is_accepted_where_a_number_is_wanted() -> None:
    assert load({"router": {"request_timeout_s": 5}}).router.request_timeout_s == 5.0


@pytest.mark.parametrize(
    ("document", "overrides", "said"),
    [
        ({"engin": {}}, {}, ["section", "'engin'", "'engine'"]),
        ({"engine": {"chunk_token": 1}}, {}, ["[engine]", "'chunk_token'", "'chunk_tokens'"]),
        ({"engine": 3}, {}, ["engine", "[engine]"]),
        ({}, {"http.prot": "1"}, ["[http]", "'prot'", "'port'"]),
        ({}, {"htp.port": "1"}, ["'htp'", "'http'"]),
        ({}, {"zzz.port": "1"}, ["'zzz'; there are model, engine, ", ", http, "]),
        ({}, {"log.xyz": "1"}, ["key in [log]: 'xyz'; there are format, level"]),
        ({}, {"api.keys": '["one'}, ["api.keys = '[\"one'", "TOML list", "a,b"]),
        ({}, {"api.keys": "[1]"}, ["api.keys", "list of texts"]),
        ({}, {"kv_transfer.verify": "yes"}, ["kv_transfer.verify", "'yes'", "true or false"]),
        ({}, {"http.port": "eight"}, ["http.port", "'eight'", "whole number"]),
        ({"engine": {"executor": "gpu"}}, {}, ["engine.executor", "'gpu'", "'torch' or 'mock'"]),
        ({"api": {"keys": "one"}}, {}, ["api.keys", "list of texts"]),
        ({"engine": {"max_slots": 0}}, {}, ["engine.max_slots", "0", "greater than 0"]),
        ({"http": {"port": 65536}}, {}, ["http.port", "65536", "65535"]),
        ({"engine": {"chunk_tokens": 8}}, {}, ["engine.chunk_tokens", "8", "engine.block_size"]),
        (
            {"engine": {"executor": "torch", "kv_dtype": "int8"}},
            {},
            ["engine.kv_dtype", "'int8'", "'f32' or 'bf16'"],
        ),
        (
            {"kv_transfer": {"max_receiving_share": 1.5}},
            {},
            ["kv_transfer.max_receiving_share", "1.5", "(0, 1]"],
        ),
        ({"control_plane": {"lease_s": "ten"}}, {}, ["control_plane.lease_s", "'ten'", "a number"]),
    ],
)
def test_refusal_names_place_value_and_what_is_right(
    document: dict[str, object], overrides: dict[str, str], said: list[str]
) -> None:
    with pytest.raises(ConfigError) as refusal:
        load(document, overrides)
    message = str(refusal.value)
    assert all(part in message for part in said), message
    assert "\n" not in message


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_time_must_be_a_finite_number(value: str) -> None:
    with pytest.raises(ConfigError, match=r"control_plane\.lease_s = .*finite"):
        load({}, {"control_plane.lease_s": value})


def test_a_peer_is_not_suspect_between_two_heartbeats() -> None:
    said = r"suspect_s = 0\.5: .*heartbeat_s = 0\.5"
    with pytest.raises(ConfigError, match=said):
        load({}, {"control_plane.suspect_s": "0.5"})
    load({}, {"control_plane.suspect_s": "0.5", "control_plane.heartbeat_s": "0.1"})
