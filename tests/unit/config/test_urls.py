"""Addresses: a wrong one is refused with what is wrong, and none is shown with its secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollstream.config import load_settings
from rollstream.errors import ConfigError
from rollstream.stream import GroupStream
from rollstream.urls import read_sentinel_url, redis_url_problem, scrub, shown_url

SECRET = "hunter2"
MALFORMED = {
    f"redis://:{SECRET}/x@host:6379": "%2F",
    f"redis://:{SECRET}#x@host:6379": "%23",
    f"redis://:a?{SECRET}@host:6379": "%3F",
    f"redis://{SECRET}/x@host": "one @",
    f"redis://{SECRET}#x@host": "without #",
    f"redis://:{SECRET}@host:abc": "port is a number",
    f"redis://:{SECRET}@host:66666": "port is a number",
    f"redis://:{SECRET}@[::1": "port is a number",
    f"redis://:{SECRET}@a..b": "whose host is a name",
    f"redis://:{SECRET}@{'a' * 64}": "whose host is a name",
    f"redis+sentinel://:{SECRET}@a..b/m": "redis+sentinel://user:password@host:port",
    f"redis://:{SECRET}@host/five": "number of a database",
    f"redis://:{SECRET}@ho st": "without blanks",
    f"redis://:{SECRET}@host\nredis://other": "without blanks",
    f"redis://:{SECRET}@host?socket_timeout=soon": "socket_timeout is a number",
    f"redis://:{SECRET}@host?decode_responses=1": "no other options",
    f"redis://:{SECRET}@host?ssl_cert_reqs=none": "no other options",
    f"http://:{SECRET}@host": "starts with one of redis://",
    f"redis+sentinel://:{SECRET}@host": "redis+sentinel://user:password@host:port",
    f"redis+sentinel://:{SECRET}/@host/m": "redis+sentinel://user:password@host:port",
    f"redis+sentinel://:{SECRET}@host,/m": "redis+sentinel://user:password@host:port",
    f"redis+sentinel://:{SECRET}@host:66666/m": "redis+sentinel://user:password@host:port",
    f"redis+sentinel://:{SECRET}@host/m/five": "redis+sentinel://user:password@host:port",
    f"redis+sentinel://:{SECRET}@host/m?ssl_cert_reqs=none": "no other options",
}


@pytest.mark.parametrize("url", MALFORMED)
def test_a_url_that_is_none_is_refused_without_its_secret(url: str, tmp_path: Path) -> None:
    assert MALFORMED[url] in redis_url_problem(url)
    with pytest.raises(ValueError, match="url: expected a URL") as caught:
        GroupStream.connect(url, run="r", connect_timeout_s=0.1)
    messages = [str(caught.value)]
    file = tmp_path / "url"
    file.write_text(url)
    for flag in (f"--redis.url={url}", f"--rq.url={url}", f"--redis.url_file={file}"):
        with pytest.raises(ConfigError) as refused:
            load_settings([flag], prog="x", environ={}, folder=tmp_path).settings.redis_url()
        messages.append(str(refused.value))
    for message in messages:
        assert MALFORMED[url] in message
        assert SECRET not in message


@pytest.mark.parametrize(
    "url",
    [
        "redis://host", "redis://:p%2Fw@host:6379/0", "rediss://u:p@[::1]:6379/",
        "unix:///tmp/redis.sock?db=1", "redis://host?socket_timeout=1.5&username=u&password=p",
        "rediss://host?ssl_cert_reqs=none", "redis+sentinel://host/m",
        "rediss+sentinel://u:p%2F@h1:1,[::1]:2,h3/my-master_1/5?ssl_cert_reqs=none",
        "redis+sentinel://h/m?sentinel_username=u&sentinel_password=p&socket_timeout=3",
    ],
)  # fmt: skip
def test_urls_of_every_form_are_taken(url: str) -> None:
    assert redis_url_problem(url) == ""


@pytest.mark.parametrize("url", MALFORMED)
def test_a_malformed_url_is_shown_without_its_secret(url: str) -> None:
    assert SECRET not in shown_url(url)


def test_scrub_hides_every_secret_in_a_text_and_nothing_else() -> None:
    text = f"'http://u:{SECRET}@a' and redis://h?password={SECRET}&db=1 at http://b/c, me@home"
    assert scrub(text) == "'http://u:***@a' and redis://h?password=***&db=1 at http://b/c, me@home"


def test_a_url_with_sentinels_says_who_watches_and_how_the_master_is_logged_in_to() -> None:
    url = f"rediss+sentinel://u:{SECRET}%2F@h1:1,[::1]:2,h3/m/5?sentinel_password={SECRET}&db=5"
    read = read_sentinel_url(url)
    assert read is not None
    assert read.sentinels == (("h1", 1), ("::1", 2), ("h3", 26379))
    assert (read.master, read.username, read.password) == ("m", None, SECRET)
    assert read.server_url == f"rediss://u:{SECRET}%2F@m/5?db=5"
    assert SECRET not in repr(read)
    assert SECRET not in shown_url(url)
    assert read_sentinel_url("redis://host") is None


def test_the_setting_with_sentinels_keeps_user_database_and_options_of_the_url(
    tmp_path: Path,
) -> None:
    def url_of(*flags: str) -> str:
        return load_settings(flags, prog="x", environ={}, folder=tmp_path).settings.redis_url()

    (tmp_path / "url").write_text("rediss://u:p@gone:1/5?socket_timeout=3\n")
    file = f"--redis.url_file={tmp_path / 'url'}"
    whole = url_of(file, "--redis.sentinel=h1:1,h2/m")
    assert whole == "rediss+sentinel://u:p@h1:1,h2/m/5?socket_timeout=3"
    assert redis_url_problem(whole) == ""
    for flags in (
        ("--redis.sentinel=h1:1,h2",),
        ("--redis.sentinel=h1:x/m",),
        ("--redis.url=unix:///s", "--redis.sentinel=h1/m"),
    ):
        with pytest.raises(ConfigError, match=r"redis\.sentinel = .*: expected host:port"):
            url_of(*flags)


def test_a_ca_that_is_no_file_is_refused_by_its_key(tmp_path: Path) -> None:
    flag = f"--redis.ca={tmp_path / 'ca.pem'}"
    with pytest.raises(ConfigError, match=r"redis\.ca .*no such file"):
        load_settings([flag], prog="x", environ={}, folder=tmp_path).settings.redis_url()
