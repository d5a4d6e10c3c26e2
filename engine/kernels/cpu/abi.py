"""csrc's structs for ctypes, field by field: kernel_table.h and step.h say what they mean."""

from __future__ import annotations

import ctypes
import enum
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_uint64, c_void_p


class WeightType(enum.IntEnum):
    """How a matrix is kept."""

    F32 = 0
    BF16 = 1
    INT8 = 2
    Q8_0 = 3
    Q4_0 = 4
    Q4_1 = 5


class KvType(enum.IntEnum):
    """How keys and values are kept."""

    F32 = 0
    BF16 = 1
    INT8 = 2


class Epilogue(enum.IntEnum):
    """What a matrix product does with its output."""

    STORE = 0
    ADD = 1
    GATED_SILU = 2


class OpKind(enum.IntEnum):
    """What an op does."""

    EMBED = 0
    NORM = 1
    LINEAR = 2
    QK_NORM = 3
    ROPE_KV_WRITE = 4
    ATTENTION = 5
    SIGNAL = 6
    SELECT_ROWS = 7
    LOGITS = 8


class Matrix(Structure):
    """`dovetail::Matrix`."""

    _fields_ = (
        ("type", c_int32),
        ("out_features", c_int32),
        ("in_features", c_int32),
        ("group", c_int32),
        ("data", c_void_p),
        ("scales", c_void_p),
        ("minimums", c_void_p),
        ("sums", c_void_p),
        ("bias", c_void_p),
    )


class Activations(Structure):
    """`dovetail::Activations`."""

    _fields_ = (
        ("values", c_void_p),
        ("ld", c_int64),
        ("quants", c_void_p),
        ("scales", c_void_p),
        ("sums", c_void_p),
        ("middles", c_void_p),
        ("centred", c_void_p),
    )


class KvLayer(Structure):
    """`dovetail::KvLayer`."""

    _fields_ = (
        ("base", c_void_p),
        ("block_stride", c_int64),
        ("head_stride", c_int64),
        ("value_offset", c_int64),
        ("scale_offset", c_int64),
        ("type", c_int32),
        ("block_size", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
    )


class Sequence(Structure):
    """`dovetail::Sequence`."""

    _fields_ = (
        ("table", c_void_p),
        ("first_row", c_int32),
        ("num_rows", c_int32),
        ("start", c_int32),
    )


class AttentionTask(Structure):
    """`dovetail::AttentionTask`."""

    _fields_ = (
        ("layer", POINTER(KvLayer)),
        ("sequence", POINTER(Sequence)),
        ("first", c_int32),
        ("count", c_int32),
        ("kv_head", c_int32),
        ("first_head", c_int32),
        ("num_heads", c_int32),
        ("window", c_int32),
        ("queries", c_void_p),
        ("queries_ld", c_int64),
        ("out", c_void_p),
        ("out_ld", c_int64),
        ("scratch", c_void_p),
        ("before", c_void_p),
        ("after", c_void_p),
    )


class SampleRow(Structure):
    """`dovetail::SampleRow`."""

    _fields_ = (
        ("seed", c_uint64),
        ("inverse_temperature", c_float),
        ("min_p", c_float),
        ("top_p", c_float),
        ("top_k", c_int32),
        ("sample_index", c_int32),
        ("position", c_int32),
        ("repetition_penalty", c_float),
        ("presence_penalty", c_float),
        ("frequency_penalty", c_float),
        ("history", c_void_p),
        ("num_history", c_int32),
        ("num_prompt", c_int32),
        ("banned", c_void_p),
        ("num_banned", c_int32),
        ("bias_ids", c_void_p),
        ("bias", c_void_p),
        ("num_bias", c_int32),
        ("allowed", c_void_p),
        ("num_logprobs", c_int32),
    )


class Op(Structure):
    """`dovetail::Op`."""

    _fields_ = (
        ("kind", c_int32),
        ("src", c_int32),
        ("out", c_int32),
        ("layer", c_int32),
        ("epilogue", c_int32),
        ("window", c_int32),
        ("is_rotary", c_int32),
        ("eps", c_float),
        ("matrix", POINTER(Matrix)),
        ("weight", c_void_p),
    )


class ModelShape(Structure):
    """`dovetail::ModelShape`."""

    _fields_ = (
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("vocab_size", c_int32),
        ("hidden_size", c_int32),
        ("max_positions", c_int32),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("register_widths", c_void_p),
        ("num_registers", c_int32),
        ("ops", POINTER(Op)),
        ("num_ops", c_int32),
        ("layers", POINTER(KvLayer)),
        ("num_layers", c_int32),
        ("block_bytes", c_int64),
    )


SignalCallback = ctypes.CFUNCTYPE(None, c_int32)


class Slots(Structure):
    """`dovetail::Slots`."""

    _fields_ = (
        ("token_ids", c_void_p),
        ("tokens_ld", c_int64),
        ("tables", c_void_p),
        ("tables_ld", c_int64),
        ("lengths", c_void_p),
        ("draws", c_void_p),
    )


class StepInputs(Structure):
    """`dovetail::StepInputs`."""

    _fields_ = (
        ("region", c_void_p),
        ("slots", Slots),
        ("work", c_void_p),
        ("num_work", c_int32),
        ("selects_all", c_int32),
        ("zeroes", c_void_p),
        ("num_zeroes", c_int32),
        ("copies", c_void_p),
        ("num_copies", c_int32),
        ("scores", c_void_p),
        ("num_scores", c_int32),
        ("on_signal", SignalCallback),
        ("hidden", c_void_p),
    )


class StepOutputs(Structure):
    """`dovetail::StepOutputs`."""

    _fields_ = (
        ("tokens", c_void_p),
        ("ranges", c_void_p),
        ("num_tokens", c_int32),
    )


class ScoreItem(Structure):
    """`dovetail::ScoreItem`."""

    _fields_ = (
        ("first_row", c_int32),
        ("num_rows", c_int32),
        ("num_top", c_int32),
        ("tokens", c_void_p),
        ("logprobs", c_void_p),
        ("ranks", c_void_p),
        ("top_ids", c_void_p),
        ("top", c_void_p),
    )


class DrawItem(Structure):
    """`dovetail::DrawItem`."""

    _fields_ = (
        ("row", c_int32),
        ("sampling", SampleRow),
        ("chosen", c_void_p),
        ("top_ids", c_void_p),
        ("top", c_void_p),
        ("token", c_int32),
    )


_INT, _FLOAT, _POINTER, _BOOL = c_int32, c_float, c_void_p, ctypes.c_bool
_CALL = ctypes.CFUNCTYPE


class KernelTable(Structure):
    """`dovetail::KernelTable`: functions that tests call, and a name for the numerics id."""

    _fields_ = (
        ("name", c_char_p),
        ("is_supported", _CALL(_BOOL)),
        ("packed_sizes", _CALL(None, _INT, _INT, _INT, POINTER(c_int64 * 4))),
        ("pack_rows", _CALL(None, POINTER(Matrix), _POINTER, _INT, _INT, _BOOL)),
        ("prepare_row", _CALL(None, POINTER(Matrix), POINTER(Activations), _INT)),
        ("prepare_groups", _CALL(None, POINTER(Matrix), POINTER(Activations), _INT, _INT, _INT)),
        (
            "gemm",
            _CALL(
                None,
                POINTER(Matrix),
                _INT,
                _INT,
                POINTER(Activations),
                _INT,
                _POINTER,
                c_int64,
                _INT,
            ),
        ),
        ("unpack_row", _CALL(None, POINTER(Matrix), _INT, _POINTER)),
        ("rms_norm", _CALL(None, _POINTER, _POINTER, _INT, _FLOAT, _POINTER)),
        ("qk_norm", _CALL(None, _POINTER, _POINTER, _INT, _INT, _FLOAT)),
        (
            "rope_kv_write",
            _CALL(
                None,
                _POINTER,
                _POINTER,
                _POINTER,
                _INT,
                _FLOAT,
                POINTER(KvLayer),
                _INT,
                _INT,
                _INT,
                _INT,
            ),
        ),
        ("attention_scratch", _CALL(c_int64, _INT, _INT, _INT, _INT)),
        ("attention_rows", _CALL(_INT, _INT, _INT)),
        ("attention", _CALL(None, POINTER(AttentionTask))),
        (
            "sample",
            _CALL(_INT, _POINTER, _INT, POINTER(SampleRow), _POINTER, _POINTER, _POINTER, _POINTER),
        ),
        (
            "score",
            _CALL(
                None, _POINTER, _INT, _INT, _INT, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER
            ),
        ),
    )
