"""The OpenAPI document says what the server does."""

from __future__ import annotations

import re
from pathlib import Path

from atropos_trajectory_api.native.openapi import NATIVE
from atropos_trajectory_api.native.routes import native_routes
from atropos_trajectory_api.service.service import Service
from plugins.trajectory_api.tests.running import running


def test_the_document_has_every_native_call_and_no_other(tmp_path: Path) -> None:
    with running(tmp_path, journal=False) as server:
        paths = server.client.get("/openapi.json").json()["paths"]
        told = {(method, path) for path, made in paths.items() for method in made if path.startswith("/v1")}
        routes = native_routes(Service(server.options))._table
        assert told == {
            (
                method.lower(),
                f"/v1/{pattern}".rstrip("/").replace("workers/*", "workers/{worker}").replace("*", "{session}"),
            )
            for method, pattern in routes
        }
        body = paths["/v1/groups"]["post"]["requestBody"]["content"]
        assert body == {"application/x-atropos": {"schema": {"type": "string", "format": "binary"}}}
        for method, path, _, takes, _ in NATIVE:
            answer = server.client.request(method, re.sub("{.*}", "7", path), content=b"" if takes is None else b"[]")
            assert str(answer.status_code) in paths[path][method]["responses"], (method, path, answer.text)
            kind = answer.headers["content-type"]
            assert kind in paths[path][method]["responses"][str(answer.status_code)]["content"], (method, path)
