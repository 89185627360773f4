"""Loading: precedence, origins, and one clear sentence for whatever is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollstream.config import Loaded, load_settings, split_argv
from rollstream.errors import ConfigError


def load(
    *argv: str, environ: dict[str, str] | None = None, folder: Path = Path("/nonexistent")
) -> Loaded:
    return load_settings(argv, prog="test", environ=environ or {}, folder=folder)


def refusal(*argv: str, environ: dict[str, str] | None = None, folder: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*argv, environ=environ, folder=folder or Path("/nonexistent"))
    return str(caught.value)


def a_file(folder: Path, text: str) -> Path:
    path = folder / "rollstream.toml"
    path.write_text(text, encoding="utf-8")
    return path


# --- precedence ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("file", "environ", "argv", "value", "origin"),
    [
        ("", {}, (), 256, "default"),
        ("[worker]\nconcurrency = 1", {}, (), 1, "FILE:2"),
        ("", {"ROLLSTREAM_WORKER__CONCURRENCY": "2"}, (), 2, "ROLLSTREAM_WORKER__CONCURRENCY"),
        ("", {}, ("--worker.concurrency", "3"), 3, "--worker.concurrency"),
        ("[worker]\nconcurrency = 1", {"ROLLSTREAM_WORKER__CONCURRENCY": "2"}, (), 2, "ROLLSTREAM"),
        ("[worker]\nconcurrency = 1", {}, ("--worker.concurrency=3",), 3, "--worker.concurrency"),
        (
            "[worker]\nconcurrency = 1",
            {"ROLLSTREAM_WORKER__CONCURRENCY": "2"},
            ("--worker.concurrency=3",),
            3,
            "--worker.concurrency",
        ),
        ("", {}, ("--worker.concurrency=3", "--worker.concurrency", "4"), 4, "--worker"),
    ],
)
def test_load_takes_the_highest_source_and_names_it(
    tmp_path: Path,
    file: str,
    environ: dict[str, str],
    argv: tuple[str, ...],
    value: int,
    origin: str,
) -> None:
    path = a_file(tmp_path, file)
    loaded = load(*argv, environ=environ, folder=tmp_path)
    assert loaded.settings.worker.concurrency == value
    assert loaded.origin("worker.concurrency").startswith(origin.replace("FILE", str(path)))


def test_load_keeps_keys_of_one_table_from_different_sources(tmp_path: Path) -> None:
    a_file(tmp_path, '[run]\nname = "a"\nseed = 1\n')
    settings = load(
        "--run.seed", "9", environ={"ROLLSTREAM_REDIS__URL": "redis://h"}, folder=tmp_path
    ).settings
    assert (settings.run.name, settings.run.seed, settings.redis_url()) == ("a", 9, "redis://h")


def test_load_reads_the_file_that_config_names_and_no_other(tmp_path: Path) -> None:
    a_file(tmp_path, '[run]\nname = "here"\n')
    other = tmp_path / "other.toml"
    other.write_bytes(b'\xef\xbb\xbf[run]\r\nname = "there"\r\n')
    assert load(f"--config={other}", folder=tmp_path).settings.run.name == "there"
    assert "no such file" in refusal("--config", str(tmp_path / "none.toml"), folder=tmp_path)


# --- forms of values -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("argv", "table", "key", "value"),
    [
        (("--engine.urls", "http://a:1, http://b:2/"), "engine", "urls", ("http://a:1", "http://b:2")),
        (("--engine.urls", '["http://a:1"]'), "engine", "urls", ("http://a:1",)),
        (("--engine.urls", ""), "engine", "urls", ()),
        (("--sampling.stop_token_ids", "1,2"), "sampling", "stop_token_ids", (1, 2)),
        (("--sampling.stop", '[","]'), "sampling", "stop", (",",)),
        (("--producer.shuffle_seed", "none"), "producer", "shuffle_seed", None),
        (("--producer.progress",), "producer", "progress", True),
        (("--producer.progress", "false"), "producer", "progress", False),
        (("--producer.keys", "prompt=question,label=a"), "producer", "keys",
         {"prompt": "question", "label": "a"}),
        (("--producer.keys", '{"prompt": "q"}'), "producer", "keys", {"prompt": "q"}),
        (("--producer.keys.prompt", "q"), "producer", "keys", {"prompt": "q"}),
        (("--weights.max_staleness", "-1"), "weights", "max_staleness", -1),
    ],
)  # fmt: skip
def test_load_reads_each_form_of_a_value(
    argv: tuple[str, ...], table: str, key: str, value: object
) -> None:
    assert getattr(getattr(load(*argv).settings, table), key) == value


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--env.math.sampling", '{"temprature": 1}'), "did you mean temperature?"),
        (("--env.math.sampling", "top_p=7"), "top_p = 7: expected a number in (0, 1]"),
        (("--env.math.sampling.tool_choice", "required"), "as a grammar"),
        (("--sampling.top_k", "0"), "(from --sampling.top_k): expected -1 or at least 1"),
        (("--sampling.stop", '["a", ""]'), "none of them empty"),
        (("--sampling.stop_token_ids", "-5"), "expected a list of whole numbers, 0 or more"),
    ],
)
def test_load_refuses_sampling_parameters_that_no_engine_takes(
    argv: tuple[str, ...], says: str
) -> None:
    assert says in refusal(*argv)


def test_load_reads_lists_and_optional_keys_from_variables() -> None:
    settings = load(
        environ={
            "ROLLSTREAM_WORKER__TOOLS": "calculator,my.tools:search",
            "ROLLSTREAM_WORKER__MAX_SEQ_LEN": "none",
        }
    ).settings
    assert settings.worker.tools == ("calculator", "my.tools:search")
    assert settings.worker.max_seq_len is None


# --- unknown keys --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("argv", "nearest"),
    [
        ("--worker.concurency=1", "--worker.concurrency"),
        ("--wroker.concurrency=1", "--worker.concurrency"),
        ("--worker.capacity_groups=1", "--producer.capacity_groups"),
        ("--reward.knd=math", "--reward.kind"),
        ("--env.math.max_turn=3", "--env.math.max_turns"),
    ],
)
def test_load_names_the_nearest_option_for_an_unknown_one(argv: str, nearest: str) -> None:
    message = refusal(argv)
    assert message.startswith(argv.partition("=")[0])
    assert f"did you mean {nearest}?" in message


def test_load_names_the_nearest_variable_and_ignores_injected_ones() -> None:
    injected = {"ROLLSTREAM_SERVICE_HOST": "10.0.0.1", "ROLLSTREAM_PORT_6379_TCP": "tcp://x"}
    assert load(environ=injected).origins == {}
    message = refusal(environ={"ROLLSTREAM_RUN__NMAE": "x"})
    assert message.startswith("environment ROLLSTREAM_RUN__NMAE")
    assert "did you mean ROLLSTREAM_RUN__NAME?" in message


def test_load_names_file_and_line_of_an_unknown_key(tmp_path: Path) -> None:
    path = a_file(tmp_path, '# a comment\n[run]\nname = "a"\n\n[worker]\nconcurency = 3\n')
    message = refusal(folder=tmp_path)
    assert message == f"{path}:6: unknown key worker.concurency; did you mean worker.concurrency?"


def test_load_names_the_tables_where_nothing_is_near() -> None:
    assert "the tables are aggregator, debug" in refusal("--zzzzzz.qqqqqq=1")


# --- bad values ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ("--worker.concurrency=abc", ("worker.concurrency = 'abc'", "a valid integer")),
        ("--worker.concurrency=0", ("worker.concurrency = '0'", "greater than or equal to 1")),
        ("--worker.lease_s=inf", ("worker.lease_s", "finite")),
        ("--worker.lease_s=nan", ("worker.lease_s", "finite")),
        ("--worker.role=boss", ("worker.role = 'boss'", "'all'", "'aggregator'")),
        ("--run.name=a b", ("run.name = 'a b'", "pattern")),
        ("--redis.url=http://x", ("redis.url", "redis://")),
        ("--engine.urls=localhost:30000", ("engine.urls", "http://")),
        ("--producer.keys=prompt", ("producer.keys", "name=value")),
        ("--engine.urls=[1", ("engine.urls", "JSON list")),
        ("--producer.shuffle_seed=-1", ("producer.shuffle_seed", "greater than or equal to 0")),
    ],
)
def test_load_says_what_was_given_where_and_what_is_expected(
    argv: str, parts: tuple[str, ...]
) -> None:
    message = refusal(argv)
    assert f"from {argv.partition('=')[0]}" in message
    assert "expected" in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[worker]\nconcurrency = true", (":2", "worker.concurrency = True", "a whole number")),
        ("[engine]\nurls = 5", ("engine.urls = 5", ":2")),
        ("[engine]\nurls = [5]", ("engine.urls", ":2")),
        ("worker = 3", ("worker is a table", ":1")),
        ('[env]\nmath = "x"', ("env.math is a table", ":2")),
        ("[worker]\nlease_s = = 1", ("not TOML", "line 2")),
        ("[run]\nseed = " + "9" * 5000, ("cannot be read", "digits")),
        ("x = " + "[" * 5000 + "]" * 5000, ("cannot be read", "recursion")),
        ("[worker]\nlease_s = inf", ("worker.lease_s", ":2", "finite")),
    ],
)
def test_load_says_what_is_wrong_in_a_file(
    tmp_path: Path, text: str, parts: tuple[str, ...]
) -> None:
    a_file(tmp_path, text)
    message = refusal(folder=tmp_path)
    for part in ("rollstream.toml", *parts):
        assert part in message


@pytest.mark.parametrize("argv", [("worker.concurrency=1",), ("-x",), ("--worker.concurrency",)])
def test_load_refuses_arguments_that_are_no_options(argv: tuple[str, ...]) -> None:
    assert argv[0] in refusal(*argv)


@pytest.mark.parametrize(
    "argv", ["--engine.urls=[", "--env.a.sampling={", "--producer.keys=", "--run.name="]
)
def test_load_repeats_no_more_of_a_wrong_value_than_a_person_reads(argv: str) -> None:
    assert len(refusal(argv + "x" * 100_000)) < 600


def test_load_counts_further_problems_in_one_line() -> None:
    message = refusal("--worker.concurrency=0", "--worker.lease_s=0")
    assert "(and 1 more)" in message
    assert "\n" not in message


# --- environments --------------------------------------------------------------------------------
def test_envs_are_the_flat_keys_where_no_table_is_given() -> None:
    envs = load(
        "--worker.max_turns=3", "--reward.kind=none", "--aggregator.filters="
    ).settings.envs()
    assert list(envs) == ["default"]
    assert (envs["default"].max_turns, envs["default"].reward.kind) == (3, "none")
    assert envs["default"].filters == ()


def test_envs_take_from_the_flat_keys_what_they_do_not_set(tmp_path: Path) -> None:
    a_file(
        tmp_path,
        '[env.Math]\nmax_turns = 2\n[env.Math.reward]\nkey = "score"\n[env.plain]\n'
        '[reward]\nkind = "my.rewards:judge"\n[producer]\nn_samples_per_prompt = 4\n',
    )
    variables = {"ROLLSTREAM_ENV__MATH__N_SAMPLES_PER_PROMPT": "6"}
    envs = load("--worker.max_turns=5", environ=variables, folder=tmp_path).settings.envs()
    assert list(envs) == ["Math", "plain"]
    math, plain = envs["Math"], envs["plain"]
    assert (math.max_turns, plain.max_turns) == (2, 5)
    assert (math.n_samples_per_prompt, plain.n_samples_per_prompt) == (6, 4)
    assert (math.reward.kind, math.reward.key) == ("my.rewards:judge", "score")
    assert (plain.reward.kind, plain.reward.key) == ("my.rewards:judge", None)
    assert math.filters == ("no_aborted", "reward_nonzero_std")


# --- the server's address ------------------------------------------------------------------------
def test_redis_url_comes_from_the_file_where_one_is_given(tmp_path: Path) -> None:
    secret = tmp_path / "url"
    secret.write_text("rediss://u:p@h:6380/0\n")
    flag = f"--redis.url_file={secret}"
    assert load(flag, "--redis.url=redis://other").settings.redis_url() == "rediss://u:p@h:6380/0"
    secret.write_text("u:p@h")
    with pytest.raises(ConfigError, match="holds no URL"):
        load(flag).settings.redis_url()
    with pytest.raises(ConfigError, match=r"redis\.url_file .* cannot be read"):
        load(f"--redis.url_file={tmp_path / 'none'}").settings.redis_url()


def test_split_argv_leaves_a_commands_own_options_alone() -> None:
    argv = ["audit", "--deep", "--run.name", "x", "--json", "--config=a.toml", "7", "--a.b=c", "y"]
    ours, others = split_argv(argv)
    assert ours == ["--run.name", "x", "--config=a.toml", "--a.b=c"]
    assert others == ["audit", "--deep", "--json", "7", "y"]
