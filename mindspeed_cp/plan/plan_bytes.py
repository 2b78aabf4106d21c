"""A plan as bytes, for the ranks of one machine, and back. No pickles: a JSON header and columns of integers.

    16 bytes   digest of all that follows, and of this format
    8 bytes    length of the header
    header     JSON: the plan and its parts, which refer to tables of documents, layouts and attentions by number
    columns    the arrays of the header in its order, column by column

A column has the smallest type that holds its numbers; a column of equal numbers is in the header alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from hashlib import blake2b
from typing import Any

import numpy as np

from mindspeed_cp.errors import PlanError
from mindspeed_cp.layout import ROW_RUN, TOKEN_SPAN, Documents, Layout
from mindspeed_cp.plan.problem import AttentionConfig, Topology
from mindspeed_cp.plan.program import Plan, Program
from mindspeed_cp.plan.records import CONTENT, MESSAGE, Messages
from mindspeed_cp.plan.verify.structure import check_types
from mindspeed_cp.schema.messages import short_repr

_TYPES: dict[int, type[np.signedinteger[Any]]] = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}  # by bytes
_LENGTH_BYTES, _DIGEST_BYTES = 8, 16
_FORMAT = b"plan 1"

Json = Any


def plan_to_bytes(plan: Plan) -> bytes:
    """Return a plan as bytes, which :func:`plan_from_bytes` reads on the same machine."""
    writer = _Writer()
    header = {"plan": writer.plan(plan), **writer.tables}
    text = json.dumps(header, separators=(",", ":"), default=_as_python).encode()
    content = b"".join([len(text).to_bytes(_LENGTH_BYTES, "little"), text, *writer.columns])
    return _digest(content) + content


def plan_from_bytes(content: bytes) -> Plan:
    """Return the plan of :func:`plan_to_bytes`.

    Raises:
        PlanError: these are not the bytes of a plan, all of them and unchanged, or they are of another release.
    """
    if not isinstance(content, bytes):
        raise PlanError(f"plan bytes are {short_repr(content)}; valid: bytes of plan_to_bytes")
    digest, content = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if _digest(content) != digest:
        raise PlanError(
            f"plan bytes: {len(digest) + len(content)} bytes that are cut off, changed, or of another release; valid: "
            "those of plan_to_bytes, of the same release"
        )
    begin = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
    header = json.loads(content[_LENGTH_BYTES:begin])
    reader = _Reader(content, begin)
    for name in ("documents", "layouts", "attentions"):
        for entry in header[name]:
            reader.tables[name].append(getattr(reader, name)(entry))
    plan = reader.plan(header["plan"])
    check_types(plan)
    return plan


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=_DIGEST_BYTES, person=_FORMAT).digest()


class _Writer:
    """Writes what a plan refers to into tables, each object once.

    Attributes:
        tables: entries of the header, by kind.
        columns: contents of the arrays, in the order in which a reader takes them.
    """

    def __init__(self) -> None:
        self.tables: dict[str, list[Json]] = {"documents": [], "layouts": [], "attentions": []}
        self._numbers: dict[int, int] = {}  # of objects in their tables, by identity
        self._columns: dict[str, list[bytes]] = {"documents": [], "layouts": [], "attentions": [], "plan": []}
        self._kind = "plan"

    @property
    def columns(self) -> list[bytes]:
        """Contents of the tables' arrays, and then those of the plan's."""
        return [column for columns in self._columns.values() for column in columns]

    def plan(self, plan: Plan) -> Json:
        layouts = plan.layout, plan.kv_layout_in, plan.q_layout_compute, plan.kv_layout_compute
        topology = plan.topology
        return {
            "algorithm": plan.algorithm,
            "attention": self._attention(plan.attention),
            "topology": [topology.nodes, topology.ranks_per_node, topology.cluster],
            "layouts": [self._layout(layout) for layout in layouts],
            "linear_layout": None if plan.linear_layout is None else self._layout(plan.linear_layout),
            "forward": self._program(plan.forward),
            "backward": self._program(plan.backward),
            "forward_order": plan.forward_order,
            "backward_order": plan.backward_order,
            "reduce_dtype": plan.reduce_dtype,
            "exchange": plan.exchange,
            "parts": [self.plan(part) for part in plan.parts],
        }

    def _program(self, program: Program) -> Json:
        numbers = {
            "steps": program.steps,
            "q_layout": self._layout(program.q_layout_compute),
            "kv_documents": self._documents(program.kv_documents),
            "attention": self._attention(program.attention),
        }
        messages = (array for kind in (program.fetch, program.reduce) for array in (kind.items, kind.runs))
        arrays = program.capacity, program.contents, program.spans, *messages
        return {**numbers, "arrays": [self._array(array) for array in arrays]}

    def _layout(self, layout: Layout) -> int:
        def entry() -> Json:
            arrays = [layout.spans] if layout.heads is None else [layout.spans, layout.heads]
            return [self._documents(layout.documents), layout.ranks, *map(self._array, arrays)]

        return self._number("layouts", layout, entry)

    def _documents(self, documents: Documents) -> int:
        def entry() -> Json:
            return [self._array(np.frombuffer(part, np.int64)) for part in documents.key]

        return self._number("documents", documents, entry)

    def _attention(self, attention: AttentionConfig) -> int:
        def entry() -> Json:
            return {field.name: getattr(attention, field.name) for field in fields(AttentionConfig)}

        return self._number("attentions", attention, entry)

    def _number(self, table: str, item: object, entry: Callable[[], Json]) -> int:
        """Return the number of an object in its table, where it is entered first if it is new."""
        if id(item) not in self._numbers:
            before, self._kind = self._kind, table
            made = entry()
            self._kind = before
            self.tables[table].append(made)
            self._numbers[id(item)] = len(self.tables[table]) - 1
        return self._numbers[id(item)]

    def _array(self, array: np.ndarray) -> Json:
        """Add an array of integers, or of records of them, and return [rows, columns, a description of each]."""
        numbers = np.ascontiguousarray(array).view(np.int64)
        shape = array.shape if array.dtype.names is None else (len(array), len(array.dtype.names))
        columns: list[Json] = []
        for column in numbers.reshape(len(array), -1).T if array.size else ():
            least, most = int(column.min()), int(column.max())
            if least == most:
                columns.append([least])
                continue
            size = _bytes_for(least, most)
            columns.append(size)
            self._columns[self._kind].append(column.astype(_TYPES[size]).tobytes())
        return [*shape, columns]


class _Reader:
    """Reads what :class:`_Writer` writes."""

    def __init__(self, content: bytes, begin: int) -> None:
        self.tables: dict[str, list[Any]] = {"documents": [], "layouts": [], "attentions": []}
        self._content, self._next = content, begin

    def documents(self, entry: Json) -> Documents:
        lengths, parents, blocks = (self._array(part).tobytes() for part in entry)
        return Documents.from_key((lengths, parents, blocks))

    def layouts(self, entry: Json) -> Layout:
        documents, ranks, spans, *heads = entry
        records = self._array(spans, TOKEN_SPAN)
        return Layout(self.tables["documents"][documents], ranks, records, self._array(heads[0]) if heads else None)

    def attentions(self, entry: Mapping[str, Json]) -> AttentionConfig:
        values: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in entry.items()}
        return AttentionConfig(**values)

    def plan(self, entry: Mapping[str, Json]) -> Plan:
        layouts = self.tables["layouts"]
        layout, kv_layout_in, q_layout_compute, kv_layout_compute = (layouts[number] for number in entry["layouts"])
        nodes, ranks_per_node, cluster = entry["topology"]
        linear = entry["linear_layout"]
        forward, backward = self._program(entry["forward"]), self._program(entry["backward"])
        return Plan(
            entry["algorithm"],
            self.tables["attentions"][entry["attention"]],
            Topology(nodes, ranks_per_node, cluster),
            layout,
            kv_layout_in,
            q_layout_compute,
            kv_layout_compute,
            forward,
            backward,
            parts=tuple(self.plan(part) for part in entry["parts"]),
            forward_order=tuple((part, step) for part, step in entry["forward_order"]),
            backward_order=tuple((part, step) for part, step in entry["backward_order"]),
            linear_layout=None if linear is None else layouts[linear],
            reduce_dtype=entry["reduce_dtype"],
            exchange=entry["exchange"],
        )

    def _program(self, entry: Mapping[str, Json]) -> Program:
        kinds = None, CONTENT, TOKEN_SPAN, MESSAGE, ROW_RUN, MESSAGE, ROW_RUN
        arrays = [self._array(array, kind) for array, kind in zip(entry["arrays"], kinds, strict=True)]
        capacity, contents, spans, *messages = arrays
        return Program(
            entry["steps"],
            capacity,
            self.tables["layouts"][entry["q_layout"]],
            self.tables["documents"][entry["kv_documents"]],
            self.tables["attentions"][entry["attention"]],
            contents,
            spans,
            Messages(*messages[:2]),
            Messages(*messages[2:]),
        )

    def _array(self, entry: Json, records: np.dtype | None = None) -> np.ndarray:
        """Return the next array: integers, int64, or records."""
        *shape, columns = entry
        table = np.empty((shape[0], int(np.prod(shape[1:]))), np.int64)
        for column, kind in enumerate(columns):
            if isinstance(kind, list):
                table[:, column] = kind[0]
                continue
            table[:, column] = np.frombuffer(self._content, _TYPES[kind], shape[0], self._next)
            self._next += shape[0] * kind
        return table.reshape(shape) if records is None else table.view(records).reshape(shape[0])


def _bytes_for(least: int, most: int) -> int:
    """Return the bytes of the smallest type that holds numbers from `least` to `most`."""
    limits = ((size, np.iinfo(kind)) for size, kind in _TYPES.items())
    return next(size for size, limit in limits if limit.min <= least and most <= limit.max)


def _as_python(value: Any) -> Any:
    """Convert a number of NumPy, for JSON."""
    return value.item()
