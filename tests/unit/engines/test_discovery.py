"""Addresses of engines: names, routers of both forms, ranks, and answers that change nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollstream.cli.engine_check import engine_findings
from rollstream.errors import ConfigError
from rollstream.settings import EngineTable
from rollstream.urls import checked_engines
from worker.engines.fleet.discovery import NoAnswer, check_spec, engines_of, is_moving, workers_in


def router(**answers: Any) -> Any:
    """Return an `ask` that knows these paths; others are 404."""

    async def ask(url: str) -> tuple[int, bytes]:
        path = url.rpartition("/")[2]
        if path not in answers:
            return 404, b"{}"
        answer = answers[path]
        if isinstance(answer, Exception):
            raise answer
        return 200, answer if isinstance(answer, bytes) else json.dumps(answer).encode()

    return ask


def name(*addresses: str) -> Any:
    async def resolve(host: str, port: int) -> list[str]:
        assert (host, port) == ("engines", 30000)
        if not addresses:
            raise OSError("Name or service not known")
        return list(addresses)

    return resolve


async def nobody(url: str) -> tuple[int, bytes]:
    raise AssertionError(url)


async def test_plain_url_is_its_own_engine() -> None:
    assert await engines_of("http://a:1", nobody) == ["http://a:1"]
    assert not is_moving("http://a:1")


async def test_name_is_every_address_that_it_has() -> None:
    urls = await engines_of(
        "dns+http://engines:30000/base", nobody, name("10.0.0.1", "10.0.0.2", "fd00::1")
    )
    assert urls == [
        "http://10.0.0.1:30000/base",
        "http://10.0.0.2:30000/base",
        "http://[fd00::1]:30000/base",
    ]
    assert is_moving("dns+http://engines:30000")


async def test_name_that_cannot_be_resolved_is_no_answer_rather_than_no_engine() -> None:
    with pytest.raises(NoAnswer, match="engines cannot be resolved"):
        await engines_of("dns+http://engines:30000", nobody, name())


async def test_router_of_today_lists_its_workers_without_their_ranks() -> None:
    workers = {
        "workers": [
            {"id": "1", "url": "http://a:1@0", "is_healthy": True},
            {"id": "2", "url": "http://a:1@1"},
            {"url": "http://user@b:2/"},
            {"url": "grpc://c:3"},
            {"no": "url"},
            7,
        ],
        "total": 6,
    }
    urls = await engines_of("router+http://r:9", router(workers=workers))
    assert urls == ["http://a:1", "http://user@b:2"]


async def test_older_router_lists_urls() -> None:
    urls = {"urls": ["http://a:1/", "http://b:2@13"]}
    assert await engines_of("router+http://r:9", router(list_workers=urls)) == [
        "http://a:1",
        "http://b:2",
    ]


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        ({}, "/workers answered 404; /list_workers answered 404"),
        ({"workers": {"workers": []}}, "/workers names no worker"),
        ({"workers": b"<html>"}, "/workers is not JSON"),
        ({"workers": b"[" * 100_000}, "/workers"),
        ({"workers": NoAnswer("gone")}, "gone"),
    ],
)
async def test_router_without_workers_is_no_answer_and_says_why(
    answers: dict[str, Any], text: str
) -> None:
    with pytest.raises(NoAnswer, match=text):
        await engines_of("router+http://r:9", router(**answers))


@pytest.mark.parametrize("answer", [None, [], 7, "x", {"workers": 3}, {"workers": {"a": 1}}])
def test_anything_else_of_a_router_names_nobody(answer: Any) -> None:
    assert workers_in(answer) == []


def test_endless_list_of_workers_is_cut() -> None:
    assert len(workers_in({"urls": [f"http://a:{i}" for i in range(1, 5000)]})) == 1024


@pytest.mark.parametrize("spec", ["ftp://a", "dns+a:1", "router+ftp://a", "a:1", "dns+router+x"])
def test_address_that_is_none_is_refused_by_name(spec: str) -> None:
    with pytest.raises(ConfigError, match="is not http://host:port"):
        check_spec(spec)
    with pytest.raises(ValueError, match="with dns\\+ or router\\+ before that"):
        EngineTable(urls=(spec,))


@pytest.mark.parametrize(
    "url", [f"http://{'a' * 64}.com", "http://a..b", "http://xn--a", "http://a/b?c", "http://a#b"]
)
def test_address_that_no_resolver_takes_or_no_path_fits_behind_is_refused(url: str) -> None:
    for kind in ("", "dns+", "router+"):
        with pytest.raises(ConfigError, match=r"engine\.urls"):
            check_spec(kind + url)


@pytest.mark.parametrize("spec", ["dns+https://engines:30000", "dns+HTTPS://engines/base"])
def test_name_with_tls_is_refused_wherever_engines_are_named(spec: str) -> None:
    """Its engines would be called by address, which no certificate names."""
    sentence = "certificate"
    with pytest.raises(ConfigError, match=sentence):
        check_spec(f" {spec}/")
    with pytest.raises(ValueError, match=sentence):
        EngineTable(urls=("http://a:1", spec))
    with pytest.raises(ValueError, match=sentence):
        checked_engines([spec])
    _, [finding] = engine_findings([spec], "sglang", timeout_s=5.0, info=None)
    assert sentence in finding.what


def test_settings_take_every_kind_of_address() -> None:
    urls = ("http://a:1", "dns+http://b:2", "router+https://c:3")
    assert EngineTable(urls=urls).urls == urls
    assert tuple(map(check_spec, urls)) == urls
