"""Dashboards: written from code, of metrics that exist, readable, and JSON as Grafana types it.

What needs npm or Debian's promtool is `slow`.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ops.dashboards.__main__ import FOLDER, files, main
from ops.dashboards.panels import names_of
from tests.ops.debian import alone, tools
from tests.ops.promql import (
    CUMULATIVE,
    NAN_WITHOUT_ENGINE,
    OF_THE_RUN,
    ROOT,
    aggregations,
    bare,
    recorded,
    rules,
    unknown,
    windows,
)

BOARDS: dict[str, dict[str, Any]] = {name: json.loads(text) for name, text in files().items()}
UNITS = {"none", "short", "s", "percentunit", "reqps", "ops", "bytes", "Bps"}
"""Units of Grafana's that are used; ours begin with suffix: or si:."""
NPM = {"@grafana/schema": "13.2.3", "typescript": "5.9.3"}


def panels() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, board in BOARDS.items():
        for panel in board["panels"]:
            if panel["type"] != "row":
                yield f"{name}: {panel['title']}", panel


PANELS = dict(panels())


def questions() -> Iterator[tuple[str, str]]:
    for title, panel in PANELS.items():
        for expr in targets(panel):
            yield title, expr


def targets(panel: dict[str, Any]) -> list[str]:
    return [target["expr"] for target in panel["targets"]]


# --- the generator -------------------------------------------------------------------------------
def test_committed_dashboards_are_what_the_generator_writes() -> None:
    assert main(["--check"]) == 0


def test_check_mode_changes_nothing_and_names_what_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--folder", str(tmp_path)]) == 0
    assert main(["--folder", str(tmp_path), "--check"]) == 0
    edited, extra = tmp_path / "rollstream-workers.json", tmp_path / "mine.json"
    edited.write_text(edited.read_text().replace("Fleet", "Flotte"))
    extra.write_text("{}")
    (tmp_path / "rollstream-groups.json").unlink()
    assert main(["--folder", str(tmp_path), "--check"]) == 1
    said = capsys.readouterr().err
    named = re.findall(r"^(\S+) differs", said, flags=re.MULTILINE)
    assert named == ["mine.json", "rollstream-groups.json", "rollstream-workers.json"]
    assert "Flotte" in edited.read_text()
    assert main(["--folder", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(files())


@pytest.mark.parametrize(
    ("expr", "names"),
    [
        (
            'sum by (a, up) (rate(x_bucket{le=~"y(z)"}[5m])) / on () group_left (b) up',
            ["x_bucket", "up"],
        ),
        ("a:b:c offset 5m unless on (env) z > bool 1.5e9  # s", ["a:b:c", "z"]),
        ("histogram_quantile(0.95, rollstream:x) or vector(0)", ["rollstream:x"]),
    ],
)
def test_names_of_finds_metrics_and_nothing_else(expr: str, names: list[str]) -> None:
    assert names_of(expr) == names


# --- each dashboard ------------------------------------------------------------------------------
def test_there_are_four_dashboards_with_fixed_names_that_nobody_edits() -> None:
    assert {board["title"].partition(" / ")[2] for board in BOARDS.values()} == {
        "Overview",
        "Workers",
        "Groups and filters",
        "Engines and Redis",
    }
    for name, board in BOARDS.items():
        assert f"{board['uid']}.json" == name
        assert 8 <= len(board["uid"]) <= 40
        assert board["editable"] is False
        assert board["schemaVersion"] == 39


def test_overview_has_every_panel_that_was_asked_for() -> None:
    wanted = {
        "Groups", "Trajectories", "Trainable tokens", "In flight against the limit",
        "Samples that wait or run", "Groups that wait", "Trainer waits",
        "Trajectories aborted or failed", "Groups dropped", "Time of a trajectory",
        "Age in weight versions",
        "Where the time of a trajectory goes", "Trajectories by status", "Length of responses",
        "Length of responses that the trainer gets",
    }  # fmt: skip
    board = BOARDS["rollstream-overview.json"]
    titles = {panel["title"] for panel in board["panels"]}
    assert wanted <= titles
    assert [p["title"] for p in board["panels"] if p["type"] == "row"][-1] == "Engines"


@pytest.mark.parametrize("name", BOARDS)
def test_datasource_is_chosen_at_the_top_and_nowhere_else(name: str) -> None:
    variables = {v["name"]: v for v in BOARDS[name]["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    wanted = {"type": "prometheus", "uid": "${datasource}"}
    found = [p["datasource"] for p in BOARDS[name]["panels"] if p["type"] != "row"]
    found += [t["datasource"] for p in BOARDS[name]["panels"] for t in p.get("targets", ())]
    found += [v["datasource"] for v in variables.values() if v["type"] == "query"]
    assert all(one == wanted for one in found)


@pytest.mark.parametrize("name", BOARDS)
def test_variables_are_used_and_ask_for_what_is_exported(name: str) -> None:
    board = BOARDS[name]
    exprs = " ".join(expr for p in board["panels"] if p["type"] != "row" for expr in targets(p))
    used = set(re.findall(r"\$(?!__)(\w+)", exprs))
    assert used == {v["name"] for v in board["templating"]["list"] if v["type"] == "query"}
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            asked = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
            assert asked
            assert unknown(asked[1]) == []
            assert asked[2] == variable["name"]


@pytest.mark.parametrize("name", BOARDS)
def test_panels_lie_within_the_grid_and_never_on_each_other(name: str) -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in BOARDS[name]["panels"]:
        place = panel["gridPos"]
        assert place["x"] >= 0
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, f"{panel['title']} lies on {taken[x, y]}"
                taken[x, y] = panel["title"]


@pytest.mark.parametrize("name", BOARDS)
def test_panels_and_their_questions_can_be_told_apart(name: str) -> None:
    found = [panel["id"] for panel in BOARDS[name]["panels"]]
    titles = [panel["title"] for panel in BOARDS[name]["panels"]]
    assert len(set(found)) == len(found)
    assert len(set(titles)) == len(titles)
    for panel in BOARDS[name]["panels"]:
        letters = [target["refId"] for target in panel.get("targets", ())]
        assert len(set(letters)) == len(letters)
        assert panel["type"] == "row" or letters


# --- each panel ----------------------------------------------------------------------------------
def test_panels_have_a_unit_a_description_and_words_for_no_data() -> None:
    for title, panel in PANELS.items():
        defaults = panel["fieldConfig"]["defaults"]
        unit = defaults["unit"]
        assert unit in UNITS or re.match(r"(suffix|si):\S", unit), f"{title}: unit {unit!r}"
        assert defaults["noValue"] == "no traffic", title
        nan = defaults["mappings"][0]["options"]
        assert nan == {"match": "nan", "result": {"text": "no traffic"}}, title
        names = list(dict.fromkeys(name for expr in targets(panel) for name in names_of(expr)))
        text, _, end = panel["description"].rpartition("\n\nMetrics: ")
        assert end == ", ".join(names), title
        assert text[8:].endswith("."), title


def test_panels_ask_for_nothing_that_nobody_exports() -> None:
    bad = {
        title: found
        for title, panel in PANELS.items()
        if (found := [b for expr in targets(panel) for b in unknown(without_variables(expr))])
    }
    assert bad == {}


def test_panels_see_counters_by_their_rate_over_grafanas_interval() -> None:
    for title, expr in questions():
        assert bare(expr, CUMULATIVE, "rate|increase") == [], title
        assert set(windows(expr)) <= {"$__rate_interval"}, title


def test_panels_sum_buckets_by_edge_and_make_quantiles_or_heatmaps_of_them() -> None:
    for title, panel in PANELS.items():
        is_heatmap = panel["type"] == "heatmap"
        for target in panel["targets"]:
            expr = target["expr"]
            is_of_buckets = bool(re.search(r"_bucket\b", expr))
            assert is_of_buckets == (is_heatmap or "histogram_quantile" in expr), title
            assert (target["format"] == "heatmap") == is_heatmap, title
            assert not is_of_buckets or re.search(r"\bby \((\w+, )*le\)", expr), title


def test_panels_add_no_place_without_an_engine() -> None:
    """It is NaN, and a sum with NaN in it is NaN."""
    for title, expr in questions():
        for name in set(names_of(expr)) & NAN_WITHOUT_ENGINE:
            assert re.search(rf"{name}(\{{[^}}]*\}})? >= 0\)", expr), title


def test_what_two_exporters_say_of_the_run_is_drawn_once() -> None:
    """One that is replaced is scraped for a while under two addresses."""
    drawn = 0
    for title, expr in questions():
        for name in set(names_of(expr)) & OF_THE_RUN:
            assert set(aggregations(expr, name)) == {"max"}, (title, expr)
            drawn += 1
    assert drawn > 20


def test_nothing_is_divided_by_nothing() -> None:
    """What comes of it is NaN or infinite, and one point of that takes the whole axis."""
    asked = [*questions(), *recorded().items()]
    asked += [(rule["alert"], rule["expr"]) for rule in rules("alerts.yml")]
    divided = [(title, expr.split(" / ")[1:]) for title, expr in asked if " / " in expr]
    assert len(divided) > 5
    for title, (by,) in divided:
        inner = re.sub(r"^on \(\) group_left \(\) ", "", by)
        assert re.match(r"\(.* > 0\)(?: > [\d.]+)?$", inner.strip()), (title, by)


def test_legends_name_the_labels_that_are_left_of_a_sum() -> None:
    for title, panel in PANELS.items():
        for target in panel["targets"]:
            expr = target["expr"]
            used = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            if names_of(expr)[0] in recorded():
                expr = f"{expr} {_deep(names_of(expr)[0])}"
            expr = re.sub(r"(?<=\()max by \([^)]*\)", "max", expr)  # a sum is around it
            kept = {
                label
                for labels in re.findall(r"\bby \(([^)]*)\)", expr)
                for label in re.findall(r"\w+", labels)
            }
            assert used <= kept, title
            # What is left of `by` is the edge of a bucket, or chosen by a matcher of its own.
            named = kept - {"le"} - set(re.findall(r'(\w+)="', expr))
            assert not named or used, f"{title}: several series with one name: {expr}"


def _deep(name: str) -> str:
    """Return how a series is recorded, and how those that it is made of are."""
    expr = recorded()[name]
    return " ".join([expr, *(_deep(inner) for inner in names_of(expr) if inner in recorded())])


# --- provisioning --------------------------------------------------------------------------------
def test_grafana_is_given_the_folder_that_compose_mounts_and_the_interval_that_is_scraped() -> None:
    provisioning = ROOT / "ops" / "grafana" / "provisioning"
    provider = yaml.safe_load((provisioning / "dashboards" / "rollstream.yml").read_text())
    source = yaml.safe_load((provisioning / "datasources" / "rollstream.yml").read_text())
    scraped = yaml.safe_load((ROOT / "ops" / "prometheus" / "prometheus.yml").read_text())
    (one,) = provider["providers"]
    mounts = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["grafana"]
    folder = FOLDER.relative_to(ROOT)
    assert f"./{folder}:{one['options']['path']}:ro" in mounts["volumes"]
    assert f"./{provisioning.relative_to(ROOT)}:/etc/grafana/provisioning:ro" in mounts["volumes"]
    assert one["allowUiUpdates"] is False
    interval = source["datasources"][0]["jsonData"]["timeInterval"]
    assert interval == scraped["global"]["scrape_interval"]


# --- what the programs say -----------------------------------------------------------------------
def without_variables(expr: str) -> str:
    return (
        re.sub(r"\$(?!__)\w+", ".*", expr)
        .replace("$__rate_interval", "1m")
        .replace('=~".*"', '!=""')
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_promtool_can_read_every_panels_questions(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": without_variables(expr)}
        for number, expr in enumerate(expr for panel in PANELS.values() for expr in targets(panel))
    ]
    file = tmp_path / "panels.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    command = [tools().promtool, "check", "rules", file]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


SCHEMA = """
import type * as schema from '@grafana/schema';
import type * as lines from '@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen';
import type * as stat from '@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen';
import type * as heatmap from '@grafana/schema/dist/esm/raw/composable/heatmap/panelcfg/x/HeatmapPanelCfg_types.gen';

// JSON holds the values of enums, not the enums.
export type Plain<T> =
  T extends string ? `${T}`
  : T extends number ? (`${T}` extends `${infer N extends number}` ? N : number)
  : T extends Array<infer U> ? Array<Plain<U>>
  : T extends object ? { [K in keyof T]: Plain<T[K]> }
  : T;
export type Dashboard = Plain<schema.Dashboard>;
export type Target = Plain<schema.DataQuery> & {
  expr: string; legendFormat: string; format: 'time_series' | 'heatmap'; editorMode: 'code';
  range: boolean; instant: boolean;
};
export type Options = {
  timeseries: Plain<lines.Options>; stat: Plain<stat.Options>; heatmap: Plain<heatmap.Options>;
};
export type Custom = {
  timeseries: Plain<lines.FieldConfig>; stat: {}; heatmap: Plain<heatmap.FieldConfig>;
};
"""  # noqa: E501 - module names


def compiler() -> Path:
    """Return a folder with the types and the compiler, fetched once."""
    folder = ROOT / ".cache" / "grafana-schema" / "-".join(NPM.values())
    folder.parent.mkdir(parents=True, exist_ok=True)
    with alone(folder.parent / "lock"):
        if not folder.is_dir():
            fetch_npm(folder)
    return folder


def fetch_npm(folder: Path) -> None:
    if shutil.which("npm") is None:
        pytest.fail("npm is not on PATH: these tests need Node.js 20 or newer")
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        work = Path(made) / "packages"
        work.mkdir()
        (work / "package.json").write_text(json.dumps({"private": True, "dependencies": NPM}))
        done = subprocess.run(
            ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--silent"],
            cwd=work, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"npm could not fetch {NPM}: {done.stdout}{done.stderr}"
        work.rename(folder)


def compiled(source: Path) -> subprocess.CompletedProcess[str]:
    folder = compiler()
    (source / "node_modules").symlink_to(folder / "node_modules")
    (source / "tsconfig.json").write_text(
        json.dumps(
            {
                "compilerOptions": {
                    "strict": True,
                    "noEmit": True,
                    "skipLibCheck": True,
                    "module": "esnext",
                    "moduleResolution": "bundler",
                    "target": "es2022",
                    "types": [],
                    "preserveSymlinks": True,
                },
                "include": ["*.ts"],
            }
        )
    )
    return subprocess.run(
        [folder / "node_modules" / ".bin" / "tsc", "-p", source],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def as_typescript(board: dict[str, Any]) -> str:
    """Return a module that compiles exactly where the dashboard is what Grafana's types say."""
    lines = [
        "import type { Custom, Dashboard, Options, Target } from './schema';",
        f"export const board: Dashboard = {json.dumps(board)};",
    ]
    for panel in board["panels"]:
        if panel["type"] != "row":
            kind, number = panel["type"], panel["id"]
            custom = panel["fieldConfig"]["defaults"]["custom"]
            lines += [
                f"const options{number}: Options['{kind}'] = {json.dumps(panel['options'])};",
                f"const custom{number}: Custom['{kind}'] = {json.dumps(custom)};",
                f"const targets{number}: Target[] = {json.dumps(panel['targets'])};",
            ]
    return "\n".join(lines) + "\n"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_dashboards_are_what_grafanas_own_types_say(tmp_path: Path) -> None:
    (tmp_path / "schema.ts").write_text(SCHEMA)
    for name, board in BOARDS.items():
        (tmp_path / name.replace(".json", ".ts")).write_text(as_typescript(board))
    done = compiled(tmp_path)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_grafanas_types_refuse_what_is_none_of_theirs(tmp_path: Path) -> None:
    (tmp_path / "schema.ts").write_text(SCHEMA)
    text = as_typescript(BOARDS["rollstream-overview.json"])
    for number, (right, wrong) in enumerate(
        [
            ('"schemaVersion": 39', '"schemaVersion": "39"'),
            ('"drawStyle": "line"', '"drawStyle": "lines"'),
            ('"displayMode": "table"', '"displayMode": "tables"'),
            ('"editable": false', '"editabel": false'),
            ('"legendFormat"', '"legend"'),
        ]
    ):
        assert right in text
        (tmp_path / f"wrong{number}.ts").write_text(text.replace(right, wrong))
    done = compiled(tmp_path)
    assert done.returncode != 0
    assert set(re.findall(r"wrong(\d)\.ts\(", done.stdout)) == {"0", "1", "2", "3", "4"}
