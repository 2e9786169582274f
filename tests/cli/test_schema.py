from __future__ import annotations

import json

import pytest

from hpcddp.cli import boundary
from hpcddp.cli.main import app
from hpcddp.jobfile.schema import job_schema


@pytest.mark.parametrize("arguments", [["schema"], ["schema", "--json"]])
def test_schema_prints_one_json_document(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert boundary.run(app, arguments) == 0
    assert json.loads(capsys.readouterr().out) == job_schema()
