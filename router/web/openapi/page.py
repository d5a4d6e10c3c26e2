"""/docs: the document for people, made by the browser alone; nothing is fetched from elsewhere."""

from __future__ import annotations

DOCS_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Dovetail API</title>
<style>
  body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto }
  code { font: 13px ui-monospace, monospace }
  summary { cursor: pointer; padding: .3rem 0 }
  summary code { font-weight: 600 }
  table { border-collapse: collapse; margin: .5rem 0 1rem }
  td { border-top: 1px solid #8884; padding: .2rem .8rem .2rem 0; vertical-align: top }
  details details, table { margin-left: 1rem }
</style>
<h1>Dovetail API</h1>
<p>The whole document: <a href="openapi.json">openapi.json</a></p>
<main></main>
<script>
const make = (tag, ...inside) => {
  const made = document.createElement(tag);
  made.append(...inside);
  return made;
};
const code = (text) => make("code", text);
const nameOf = (shape) => shape.$ref && shape.$ref.split("/").pop();
const kind = (shape) => {
  if (shape.$ref) return nameOf(shape);
  if (shape.anyOf) return shape.anyOf.map(kind).join(" | ");
  if (shape.enum) return shape.enum.map((one) => JSON.stringify(one)).join(" | ");
  if (shape.const !== undefined) return JSON.stringify(shape.const);
  if (shape.type === "array") return "list of " + kind(shape.items || {});
  return shape.type || "any";
};
const refs = (shape) =>
  [shape, ...(shape.anyOf || []), shape.items || {}].flatMap((one) =>
    one === shape ? (one.$ref ? [nameOf(one)] : []) : refs(one));
const fields = (api, shape, seen) => {
  const body = shape.$ref ? api.components.schemas[nameOf(shape)] : shape;
  const needed = new Set(body.required || []);
  const table = make("table");
  const inner = [];
  for (const [name, field] of Object.entries(body.properties || {})) {
    const about = (needed.has(name) ? "required. " : "") + (field.description || "");
    table.append(make("tr",
      make("td", code(name)), make("td", code(kind(field))), make("td", about)));
    inner.push(...refs(field).filter((one) => !seen.has(one)));
  }
  const more = [...new Set(inner)].map((one) => {
    const next = new Set([...seen, one]);
    return make("details", make("summary", code(one)),
      fields(api, { $ref: "#/components/schemas/" + one }, next));
  });
  return make("div", body.description || "", table, ...more);
};
const media = (api, content) => Object.entries(content).map(([type, one]) => {
  const shape = one["x-event-schema"] || one.schema;
  return make("div", code(type), shape.$ref ? fields(api, shape, new Set([nameOf(shape)])) : "");
});
const show = (api) => {
  const main = document.querySelector("main");
  for (const [path, methods] of Object.entries(api.paths))
    for (const [method, operation] of Object.entries(methods)) {
      const entry = make("details",
        make("summary", code(method.toUpperCase() + " " + path), " " + operation.summary));
      if (operation.requestBody)
        entry.append(make("h4", "Body"), ...media(api, operation.requestBody.content));
      for (const [status, answer] of Object.entries(operation.responses))
        entry.append(make("h4", status + " ", answer.description), ...media(api, answer.content));
      main.append(entry);
    }
};
fetch("openapi.json").then((answer) => answer.json()).then(show);
</script>
</html>
"""
