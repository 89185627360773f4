"""ops/k8s: sound by Kubernetes' schemas, safe by its settings, and what it names exists.

There is no cluster here. The fast tests hold the files against the bundled schemas, against each
other and against docker-compose.yml; the slow ones build them with the real kustomize and hold the
operator's resources against the types of its own API.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

import rollstream
from rollstream.config import load_settings
from rollstream.settings import Settings
from tests.ops.composed import ROOT, load
from tests.ops.kubectl import kubectl

BASE = ROOT / "ops" / "k8s"
OPERATORS = {"PodMonitor", "PrometheusRule"}
SECRETS = {
    "rollstream-redis": {"redis_url", "redis.acl"},
    "rollstream-watching": {"redis_exporter.json"},
}
"""Made before anything is applied (docs/deploy.md), from the files of ops/make_secrets.py."""
OURS = ("producer", "worker", "verifier", "exporter")
NPM = ("@kubernetes-models/prometheus-operator@6.0.0", "typescript@5.9.3")

Resource = dict[str, Any]


def kustomization() -> Resource:
    loaded: Resource = yaml.safe_load((BASE / "kustomization.yaml").read_text())
    return loaded


@pytest.fixture(scope="module")
def resources() -> list[Resource]:
    return [
        resource
        for name in kustomization()["resources"]
        for resource in yaml.safe_load_all((BASE / name).read_text())
    ]


def of(resources: list[Resource], *kinds: str) -> list[Resource]:
    found = [resource for resource in resources if resource["kind"] in kinds]
    assert found, kinds
    return found


def workloads(resources: list[Resource]) -> dict[str, Resource]:
    """Return name → Deployment or StatefulSet."""
    return {r["metadata"]["name"]: r for r in of(resources, "Deployment", "StatefulSet")}


def pod(workload: Resource) -> Resource:
    spec: Resource = workload["spec"]["template"]["spec"]
    return spec


def containers(resources: list[Resource]) -> Iterator[tuple[str, Resource, Resource]]:
    for name, workload in workloads(resources).items():
        for container in pod(workload)["containers"]:
            yield f"{name}/{container['name']}", pod(workload), container


# --- the files -----------------------------------------------------------------------------------
def test_every_file_of_the_base_is_listed_once_and_exists() -> None:
    listed = kustomization()["resources"]
    assert len(set(listed)) == len(listed)
    files = {str(path.relative_to(BASE)) for path in BASE.rglob("*.yaml")}
    assert set(listed) == files - {"kustomization.yaml"}
    for generator in kustomization()["configMapGenerator"]:
        for name in generator.get("files", []):
            assert (BASE / name).is_file(), name


def test_resources_follow_the_schemas_of_kubernetes(resources: list[Resource]) -> None:
    for resource in resources:
        if resource["kind"] not in OPERATORS:
            kubernetes_validate.validate(
                resource, kubernetes_validate.latest_version(), strict=True
            )


def test_names_are_unique(resources: list[Resource]) -> None:
    names = [(resource["kind"], resource["metadata"]["name"]) for resource in resources]
    assert len(set(names)) == len(names)


def test_what_is_generated_is_current_and_a_changed_source_is_noticed(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "ops", tmp_path / "ops", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, str(tmp_path / "ops" / "manifests.py")]
    checked = subprocess.run([*command, "--check"], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    alerts = min((tmp_path / "ops/prometheus/rules").glob("*.yml"))
    alerts.write_text(alerts.read_text().replace("for: ", "for: 1", 1))
    checked = subprocess.run([*command, "--check"], capture_output=True, text=True, check=False)
    assert checked.returncode == 1
    assert "prometheusrule.yaml: not current" in checked.stdout
    subprocess.run(command, capture_output=True, check=True)
    checked = subprocess.run([*command, "--check"], capture_output=True, text=True, check=False)
    assert checked.returncode == 0


def test_operator_gets_the_very_groups_of_rules_that_compose_has(resources: list[Resource]) -> None:
    (rule,) = of(resources, "PrometheusRule")
    files = sorted((ROOT / "ops/prometheus/rules").glob("*.yml"))
    groups = [group for file in files for group in yaml.safe_load(file.read_text())["groups"]]
    assert groups
    assert rule["spec"]["groups"] == groups


# --- names that must resolve ---------------------------------------------------------------------
def test_every_selector_finds_exactly_the_pods_of_one_workload(resources: list[Resource]) -> None:
    labels = {
        name: workload["spec"]["template"]["metadata"]["labels"]
        for name, workload in workloads(resources).items()
    }
    selectors = {
        (r["kind"], r["metadata"]["name"]): r["spec"]["selector"]["matchLabels"]
        for r in of(resources, "Deployment", "StatefulSet", "PodDisruptionBudget", "PodMonitor")
    }
    for service in of(resources, "Service"):
        selectors["Service", service["metadata"]["name"]] = service["spec"]["selector"]
    for policy in of(resources, "NetworkPolicy"):
        selector = policy["spec"]["podSelector"]["matchLabels"]
        selectors["NetworkPolicy", policy["metadata"]["name"]] = selector
    assert len(selectors) == 12
    for (kind, name), selector in selectors.items():
        found = [pods for pods, has in labels.items() if selector.items() <= has.items()]
        assert found == [name], f"{kind} {name}: {selector} finds {found}"


def test_only_who_says_that_it_is_a_client_reaches_the_server(resources: list[Resource]) -> None:
    (policy,) = of(resources, "NetworkPolicy")
    first, second = policy["spec"]["ingress"]
    (who,) = first["from"]
    label = who["podSelector"]["matchLabels"]
    assert [port["port"] for port in first["ports"]] == ["redis"]
    assert second == {"ports": [{"protocol": "TCP", "port": "metrics"}]}
    for name, workload in workloads(resources).items():
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert label.items() <= labels.items(), name
    (key,) = label
    assert f"{key}: {label[key]}" in (ROOT / "docs" / "deploy.md").read_text()


def test_every_configuration_secret_and_volume_that_is_named_exists(
    resources: list[Resource],
) -> None:
    maps = {generator["name"] for generator in kustomization()["configMapGenerator"]}
    used: set[str] = set()
    for name, spec, container in containers(resources):
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        claims = {
            claim["metadata"]["name"]
            for workload in of(resources, "StatefulSet")
            if pod(workload) is spec
            for claim in workload["spec"]["volumeClaimTemplates"]
        }
        for mount in container["volumeMounts"]:
            assert mount["name"] in volumes.keys() | claims, f"{name}: {mount['name']}"
        for source in container.get("envFrom", []):
            used.add(source["configMapRef"]["name"])
        for volume in spec["volumes"]:
            if "configMap" in volume:
                used.add(volume["configMap"]["name"])
            if "secret" in volume:
                keys = {item["key"] for item in volume["secret"]["items"]}
                assert keys <= SECRETS[volume["secret"]["secretName"]], name
    assert used == maps
    accounts = {r["metadata"]["name"] for r in of(resources, "ServiceAccount")}
    assert {pod(w)["serviceAccountName"] for w in workloads(resources).values()} == accounts


def test_secrets_are_the_files_that_the_program_makes_and_the_page_says_how(tmp_path: Path) -> None:
    made = tmp_path / "made", tmp_path / "watching"
    command = [sys.executable, "ops/make_secrets.py", str(made[0]), "rollstream-redis", "6379"]
    subprocess.run([*command, str(made[1])], cwd=ROOT, check=True, capture_output=True)
    files = {path.name for folder in made for path in folder.iterdir()}
    page = (ROOT / "docs" / "deploy.md").read_text()
    for secret, keys in SECRETS.items():
        assert keys <= files
        assert f"create secret generic {secret} " in page
    service = (made[0] / "redis_url").read_text().rpartition("@")[2].strip()
    assert service == "rollstream-redis:6379/0"


def test_every_port_that_is_named_is_one_of_the_pod(resources: list[Resource]) -> None:
    ports = {
        name: {port["name"] for c in pod(workload)["containers"] for port in c.get("ports", [])}
        for name, workload in workloads(resources).items()
    }
    for _, spec, container in containers(resources):
        own = {port["name"] for port in container.get("ports", [])}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            if "httpGet" in container.get(probe, {}):
                assert container[probe]["httpGet"]["port"] in own
        assert spec["enableServiceLinks"] is False
    for service in of(resources, "Service"):
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in ports[service["metadata"]["name"]]
    for monitor in of(resources, "PodMonitor"):
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            assert endpoint["port"] in ports[monitor["metadata"]["name"]]


def test_every_variable_is_a_key_of_the_configuration(resources: list[Resource]) -> None:
    given = [
        literal.partition("=")[0]
        for generator in kustomization()["configMapGenerator"]
        for literal in generator.get("literals", [])
    ]
    for _, _, container in containers(resources):
        given += [variable["name"] for variable in container.get("env", [])]
    given += [
        name
        for service in load()["services"].values()
        for name in service.get("environment", {})
        if not name.startswith("GF_")
    ]
    assert len(set(given)) >= 7
    for name in given:
        prefix, table, key = name.replace("ROLLSTREAM_", "ROLLSTREAM__", 1).split("__")
        assert prefix == "ROLLSTREAM"
        fields = Settings.model_fields[table.lower()].annotation.model_fields  # type: ignore[union-attr]
        assert key.lower() in fields, name


def test_every_pod_of_ours_starts_with_a_configuration_that_is_valid(
    resources: list[Resource], tmp_path: Path
) -> None:
    (literals,) = [g["literals"] for g in kustomization()["configMapGenerator"] if "literals" in g]
    given = dict(literal.split("=", 1) for literal in literals)
    secret = tmp_path / "redis_url"
    secret.write_text("redis://rollstream:password@rollstream-redis:6379/0")
    for _, _, container in containers(resources):
        if container["name"] not in OURS:
            continue
        environ = given | {v["name"]: v["value"] for v in container.get("env", [])}
        environ["ROLLSTREAM_REDIS__URL_FILE"] = str(secret)
        words = container["command"][container["command"].index("--config") :]
        (mount,) = [m for m in container["volumeMounts"] if m["name"] == "run"]
        argv = [word.replace(mount["mountPath"], str(BASE / "generated")) for word in words]
        settings = load_settings(argv, prog="", environ=environ, folder=tmp_path).settings
        assert settings.run.name == "demo"
        assert settings.producer.n_samples_per_prompt == 8
        assert "rollstream-redis" in settings.redis_url()
        ports = {port["containerPort"] for port in container.get("ports", [])}
        served = {"worker": settings.telemetry.metrics_port, "exporter": settings.exporter.port}
        assert ports == {served[name] for name in served if name == container["name"]}


# --- the same run as with Docker Compose ---------------------------------------------------------
def test_pods_run_the_commands_and_images_of_the_compose_file(resources: list[Resource]) -> None:
    services = load()["services"]
    (image,) = kustomization()["images"]
    assert f"{image['name']}:{image['newTag']}" == services["worker"]["image"]
    assert image["newTag"] == rollstream.__version__
    found = {name: container for name, _, container in containers(resources)}
    for name in OURS:
        container = found[f"rollstream-{name}/{name}"]
        config = ["--config", "/etc/rollstream/rollstream.toml"]
        assert container["command"] == [*services[name]["command"], *config]
        assert container["image"] == image["name"]
    redis, watching = found["rollstream-redis/redis"], found["rollstream-redis/redis-exporter"]
    assert redis["image"] == services["redis"]["image"]
    assert redis["command"] == services["redis"]["command"]
    assert watching["image"] == services["redis_exporter"]["image"]
    theirs = [
        w.replace("//redis:", "//rollstream-redis:") for w in services["redis_exporter"]["command"]
    ]
    assert set(watching["args"]) == {word for word in theirs if "listen-address" not in word}


def test_environment_is_that_of_the_compose_file() -> None:
    composed = load()["services"]["worker"]["environment"]
    (literals,) = [g["literals"] for g in kustomization()["configMapGenerator"] if "literals" in g]
    assert dict(literal.split("=", 1) for literal in literals) == composed


def test_metrics_keep_the_job_names_that_rules_and_dashboards_ask_for(
    resources: list[Resource],
) -> None:
    config = yaml.safe_load((ROOT / "ops/prometheus/prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    for monitor in of(resources, "PodMonitor"):
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        (relabeling,) = endpoint["relabelings"]
        assert relabeling["targetLabel"] == "job"
        job = jobs.pop(relabeling["replacement"])
        assert endpoint["interval"] == config["global"]["scrape_interval"]
        assert endpoint["scrapeTimeout"] == config["global"]["scrape_timeout"]
        assert monitor["spec"].get("sampleLimit") == job.get("sample_limit")
    assert set(jobs) == {"prometheus"}


# --- safe ----------------------------------------------------------------------------------------
def test_every_pod_is_without_privileges_and_bounded(resources: list[Resource]) -> None:
    for name, spec, container in containers(resources):
        assert spec["automountServiceAccountToken"] is False
        of_pod, own = spec["securityContext"], container["securityContext"]
        assert of_pod["runAsNonRoot"] is True
        assert of_pod["runAsUser"] > 0
        assert of_pod["seccompProfile"] == {"type": "RuntimeDefault"}
        assert own["allowPrivilegeEscalation"] is False
        assert own["readOnlyRootFilesystem"] is True
        assert own["capabilities"] == {"drop": ["ALL"]}
        assert set(container["resources"]) == {"requests", "limits"}
        assert set(container["resources"]["limits"]) == {"cpu", "memory"}, name
        for key in ("privileged", "hostNetwork", "hostPID", "hostIPC"):
            assert key not in spec | own | of_pod
        for mount in container["volumeMounts"]:
            assert mount.get("readOnly") or mount["mountPath"] in ("/tmp", "/data"), name
    (account,) = of(resources, "ServiceAccount")
    assert account["automountServiceAccountToken"] is False


def test_every_container_is_asked_for_its_health(resources: list[Resource]) -> None:
    services = load()["services"]
    for name, _, container in containers(resources):
        assert "livenessProbe" in container, name
    for _, spec, container in containers(resources):
        if container["name"] in ("worker", "exporter"):
            assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
            assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
        elif container["name"] in OURS:
            asked = container["livenessProbe"]["exec"]["command"]
            assert ["CMD", *asked] == services[container["name"]]["healthcheck"]["test"]
            environment = {v["name"]: v["value"] for v in container["env"]}
            assert environment["ROLLSTREAM_TELEMETRY__HEARTBEAT_FILE"] in asked[-1]
            assert any(mount["mountPath"] == "/tmp" for mount in container["volumeMounts"]), spec


def test_pods_have_more_time_to_stop_than_it_takes_to_drain(resources: list[Resource]) -> None:
    drain_s = tomllib.loads((BASE / "generated/rollstream.toml").read_text())["worker"]["drain_s"]
    found = workloads(resources)
    assert pod(found["rollstream-worker"])["terminationGracePeriodSeconds"] >= drain_s + 10
    for name in (*OURS, "redis"):
        grace = load()["services"][name]["stop_grace_period"]
        assert f"{pod(found[f'rollstream-{name}'])['terminationGracePeriodSeconds']}s" == grace


def test_who_must_be_alone_is_never_two(resources: list[Resource]) -> None:
    found = workloads(resources)
    for name in ("producer", "exporter"):
        assert found[f"rollstream-{name}"]["spec"]["replicas"] == 1
        assert found[f"rollstream-{name}"]["spec"]["strategy"] == {"type": "Recreate"}


# --- built by the real kustomize -----------------------------------------------------------------
@pytest.fixture(scope="module")
def built() -> list[Resource]:
    command = [kubectl(), "kustomize", str(BASE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_kustomize_builds_every_resource_with_hashed_configuration_and_pinned_images(
    built: list[Resource], resources: list[Resource]
) -> None:
    made = {(r["kind"], r["metadata"]["name"]) for r in built}
    maps = {name for kind, name in made if kind == "ConfigMap"}
    assert made - {("ConfigMap", name) for name in maps} == {
        (r["kind"], r["metadata"]["name"]) for r in resources
    }
    assert len(maps) == len(kustomization()["configMapGenerator"])
    for resource in built:
        if resource["kind"] not in OPERATORS:
            kubernetes_validate.validate(
                resource, kubernetes_validate.latest_version(), strict=True
            )
    for _, spec, container in containers(built):
        assert ":" in container["image"]
        for source in container.get("envFrom", []):
            assert source["configMapRef"]["name"] in maps
        for volume in spec["volumes"]:
            assert "configMap" not in volume or volume["configMap"]["name"] in maps
    (run,) = [r for r in built if r["metadata"]["name"].startswith("rollstream-run-")]
    assert "[producer]" in run["data"]["rollstream.toml"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_operators_resources_follow_its_own_types(built: list[Resource], tmp_path: Path) -> None:
    if shutil.which("npm") is None:
        pytest.skip("no npm here")
    install = ["npm", "install", "--silent", "--ignore-scripts", "--no-audit", "--no-fund", *NPM]
    (tmp_path / "package.json").write_text('{"type": "module"}')
    subprocess.run(install, cwd=tmp_path, check=True, capture_output=True, timeout=240)
    ours = of(built, *OPERATORS)
    assert checked(tmp_path, ours) == []
    misspelled, without = json.loads(
        json.dumps(of(built, "PodMonitor")[:1] + of(built, "PrometheusRule"))
    )
    misspelled["spec"]["podMetricsEndpoints"][0]["intervall"] = "5s"
    del without["spec"]["groups"][0]["rules"][0]["expr"]
    problems = checked(tmp_path, [misspelled, without])
    assert len(problems) == 2, problems
    assert "intervall" in problems[0]
    assert "expr" in problems[1]


def checked(folder: Path, resources: list[Mapping[str, Any]]) -> list[str]:
    """Return what TypeScript says about them as literals of the operator's types."""
    api = "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1"
    lines = [
        f'import type {{ {", ".join(f"I{kind}" for kind in sorted(OPERATORS))} }} from "{api}";'
    ]
    for number, resource in enumerate(resources):
        lines.append(f"export const r{number}: I{resource['kind']} = {json.dumps(resource)};")
    (folder / "check.ts").write_text("\n".join(lines))
    options = "--noEmit --strict --skipLibCheck --module nodenext --target es2022".split()
    done = subprocess.run(
        ["node", "node_modules/typescript/bin/tsc", *options, "check.ts"],
        cwd=folder, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    return [line for line in done.stdout.splitlines() if line.startswith("check.ts")]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_overlay_of_the_page_sets_name_space_image_run_and_number_of_workers(
    tmp_path: Path,
) -> None:
    page = (ROOT / "docs" / "deploy.md").read_text()
    (text,) = re.findall(r"```yaml\n(# kustomization.yaml\n.*?)```", page, flags=re.DOTALL)
    (tmp_path / "kustomization.yaml").write_text(text)
    shutil.copytree(BASE, tmp_path / "rollstream" / "ops" / "k8s")
    done = subprocess.run(
        [kubectl(), "kustomize", str(tmp_path)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    made = list(yaml.safe_load_all(done.stdout))
    assert {r["metadata"]["namespace"] for r in made} == {"training"}
    assert workloads(made)["rollstream-worker"]["spec"]["replicas"] == 16
    images = {c["image"] for name, _, c in containers(made) if "redis" not in name}
    assert images == {f"registry.example/rollstream:{rollstream.__version__}"}
    (given,) = [r for r in made if r["metadata"]["name"].startswith("rollstream-environment")]
    assert given["data"]["ROLLSTREAM_RUN__NAME"] == "my-run"
    assert given["data"]["ROLLSTREAM_REDIS__URL_FILE"] == "/run/rollstream/redis_url"
    for _, _, container in containers(made):
        for source in container.get("envFrom", []):
            assert source["configMapRef"]["name"] == given["metadata"]["name"]
