"""examples/kubernetes: what its parts name is there, and `kie serve` takes its arguments."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import yaml
from kie.cli import serve

FILE = Path(__file__).resolve().parents[2] / "examples" / "kubernetes" / "kie.yaml"


def parts() -> dict[str, Any]:
    """The documents of the file by kind."""
    return {part["kind"]: part for part in yaml.safe_load_all(FILE.read_text())}


def test_selectors_ports_and_volumes_fit() -> None:
    found = parts()
    assert set(found) == {"Deployment", "Service", "ServiceMonitor"}
    for part in found.values():
        assert {"apiVersion", "kind", "metadata", "spec"} == set(part)
    spec = found["Deployment"]["spec"]
    pod, labels = spec["template"]["spec"], spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"] == labels
    service = found["Service"]
    assert service["spec"]["selector"] == labels
    monitor = found["ServiceMonitor"]["spec"]
    assert monitor["selector"]["matchLabels"] == service["metadata"]["labels"]
    [box] = pod["containers"]
    ports = {port["name"] for port in box["ports"]}
    [served] = service["spec"]["ports"]
    assert served["targetPort"] in ports
    [scraped] = monitor["endpoints"]
    assert (scraped["port"], scraped["path"]) == (served["name"], "/metrics")
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert box[probe]["httpGet"]["path"] == "/health"
        assert box[probe]["httpGet"]["port"] in ports
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in box["volumeMounts"]} == volumes


def test_the_arguments_are_those_of_kie_serve() -> None:
    pod = parts()["Deployment"]["spec"]["template"]["spec"]
    [box] = pod["containers"]
    verb, *words = box["args"]
    assert verb == "serve"
    parser = ArgumentParser(exit_on_error=False)
    serve.define(parser)
    given = parser.parse_args(words)
    assert given.port == box["ports"][0]["containerPort"]
    patience = box["livenessProbe"]["periodSeconds"] * box["livenessProbe"]["failureThreshold"]
    assert given.drain_s < pod["terminationGracePeriodSeconds"] < patience
    # A host that others reach needs a key.
    assert not serve.is_loopback(given.host)
    assert "KIE_API_KEY" in {variable["name"] for variable in box["env"]}
