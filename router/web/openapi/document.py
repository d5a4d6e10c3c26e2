"""The OpenAPI 3.1 document, from the routes and the types of their bodies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from router.web.openapi.answers import ErrorAnswer
from router.web.routing import Answer, Operation, Route

_REF = "#/components/schemas/{name}"

_ERROR_TEXT = "An error; 429 and 503 say in `retry-after` when to try again."


def document(routes: Sequence[Route], *, version: str) -> dict[str, Any]:
    """Return the document of these routes."""
    types = list(_types(routes))
    shapes, components = msgspec.json.schema_components(types, ref_template=_REF)
    shape_by_type = dict(zip(types, shapes, strict=True))
    paths: dict[str, Any] = {}
    for route in routes:
        operations = paths.setdefault(route.path, {})
        operations[route.method.lower()] = _operation(route, shape_by_type)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Dovetail", "version": version},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _types(routes: Iterable[Route]) -> Iterable[type]:
    found: dict[type, None] = {ErrorAnswer: None}
    for route in routes:
        if route.operation.body is not None:
            found[route.operation.body] = None
        for answers in route.operation.answers.values():
            found.update((answer.body, None) for answer in answers if answer.body is not None)
    return found


def _operation(route: Route, shape_by_type: dict[type, Any]) -> dict[str, Any]:
    operation = route.operation
    shown: dict[str, Any] = {
        "summary": operation.summary,
        "tags": [operation.tag],
        "operationId": _operation_id(route),
        "responses": _responses(operation, shape_by_type),
    }
    name = route.path.partition("{")[2].rstrip("}")
    if name:
        parameter = {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        shown["parameters"] = [parameter]
    if operation.body is not None:
        content = {"application/json": {"schema": shape_by_type[operation.body]}}
        shown["requestBody"] = {"required": True, "content": content}
    if operation.needs_key:
        shown["security"] = [{}, {"key": []}]  # a key where the router was given keys
    return shown


def _operation_id(route: Route) -> str:
    words = route.path.replace("{", "").replace("}", "").replace(".", "/").split("/")
    return "_".join([route.method.lower(), *(word for word in words if word)])


def _responses(operation: Operation, shape_by_type: dict[type, Any]) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    for status, answers in operation.answers.items():
        content = {answer.content_type: _media(answer, shape_by_type) for answer in answers}
        text = " ".join(answer.text for answer in answers)
        responses[str(status)] = {"description": text, "content": content}
    error = {"schema": shape_by_type[ErrorAnswer]}
    responses["default"] = {"description": _ERROR_TEXT, "content": {"application/json": error}}
    return responses


def _media(answer: Answer, shape_by_type: dict[type, Any]) -> dict[str, Any]:
    if answer.body is None:
        return {"schema": {"type": "string"}}
    if answer.content_type == "application/json":
        return {"schema": shape_by_type[answer.body]}
    # OpenAPI 3.1 has no word for a stream of events; 3.2's itemSchema is not read by many yet.
    return {"schema": {"type": "string"}, "x-event-schema": shape_by_type[answer.body]}
