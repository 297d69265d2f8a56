"""`headwater land NAME`: a pipeline of `headwater.toml` is what its options on the command line would be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from headwater.cli import main
from headwater.cli.land import land
from headwater.cli.pipelines import FILE_NAME, pipeline_options
from headwater.cli.verify import verify
from support.cases import case

URL = "couchbase://127.0.0.1/travel"
BEGIN = f'[pipelines.shop]\nurl = "{URL}"\ninto = "lake"\n'
SECRET = "not to be seen"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("USER", "PASSWORD", "TLS_KEY_PASSWORD"):
        monkeypatch.setenv(f"HEADWATER_{name}", "of the environment")
    return tmp_path


def write(text: str, name: str = FILE_NAME) -> None:
    Path(name).write_text(text, encoding="utf-8")


def parsed(*arguments: str) -> dict[str, Any]:
    """What the command would be called with."""
    return land.make_context("land", [*arguments]).params


def refused(*arguments: str, command: str = "land", text: str | None = None) -> str:
    if text is not None:
        write(text)
    result = CliRunner().invoke(main, [command, *arguments])
    assert result.exit_code in (1, 2)
    assert SECRET not in result.output
    (line,) = result.output.splitlines()
    return line.removeprefix("Error: ")


# --- every option -------------------------------------------------------------------------------------------------


def samples(option: click.Option) -> tuple[str, str]:
    """A value of an option, as TOML and as on the command line. None is its default."""
    if option.is_flag:
        return "true", ""
    match option.type:
        case click.Choice() as choice:
            return f'"{choice.choices[-1]}"', choice.choices[-1]
        case click.IntRange():
            return "2", "2"
        case click.FloatRange():
            return "0.25", "0.25"
        case click.Path():
            Path("file.pem").touch()
            return '"file.pem"', "file.pem"
    metavar = str(option.metavar)
    if metavar == "MODULE:FUNCTION":
        return '"json:loads"', "json:loads"
    if "=" in metavar:
        return '{ some_name = "${VALUE}" }', "some_name=of a variable"
    if option.multiple:
        return '["a.b", "${VALUE}"]', "a.b"
    return ('"11s"', "11s") if metavar == "TIME" else ('"${VALUE}"', "of a variable")


@pytest.mark.parametrize("key", pipeline_options(land))
def test_every_option_has_its_key(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VALUE", "of a variable")
    option = pipeline_options(land)[key]
    value, word = samples(option)
    write(f'[pipelines.shop]\nurl = "{URL}"\n{key} = {value}\n' + ("" if key == "into" else 'into = "lake"\n'))
    words = [f"--{key}"] if option.is_flag else [f"--{key}={word}"]
    words += ["--into=lake"] if key != "into" else []
    words += [f"--{key}=of a variable"] if value.startswith("[") else []
    assert parsed("shop") == parsed(URL, *words)
    assert parsed("shop")[option.name or ""] != parsed(URL, "--into=other")[option.name or ""]


def test_all_options_of_the_command_are_keys() -> None:
    """Written down, so that one that gets lost is missed."""
    spelled = {name for option in land.params if isinstance(option, click.Option) for name in option.opts}
    assert {f"--{key}" for key in pipeline_options(land)} == {
        name for name in spelled if name.startswith("--") and name not in ("--all", "--config", "--help")
    }


# --- what counts --------------------------------------------------------------------------------------------------


def test_the_command_line_wins() -> None:
    write(f'{BEGIN}collection = ["a.b"]\nevery = "9s"\npassword = "${{NOT_SET}}"\nuser = "of the file"\n')
    params = parsed("shop", "--collection", "c.d", "--every=3s", "--password", "given")
    assert (params["collections"], params["every"], params["password"]) == (("c.d",), 3.0, "given")
    assert (params["user"], params["url"], params["into"]) == ("of the file", URL, "lake")


def test_options_of_stores_that_are_no_secrets() -> None:
    names = ("google_application_credentials", "aws_sse_kms_key_id", "aws_sse_bucket_key_enabled", "azure_token_file")
    write(f"{BEGIN}storage-option = {{ {', '.join(f'{name} = 1' for name in names)} }}")
    assert [*parsed("shop")["storage_options"]] == [*names]


def test_tables_for_what_has_names() -> None:
    """A name with a dot is a table in a table for TOML, unless it is quoted."""
    write(
        f'{BEGIN}[pipelines.shop.columns]\nshop.tokens = "id INT"\n"shop.items" = "name STRING"\n'
        '[pipelines.shop.storage-option]\naws_region = "x"\naws_access_key_id = "me"\n'
    )
    params = parsed("shop")
    assert params["columns"] == ("shop.tokens=id INT", "shop.items=name STRING")
    assert params["storage_options"] == {"aws_region": "x", "aws_access_key_id": "me"}


def test_the_example_of_the_guide(monkeypatch: pytest.MonkeyPatch) -> None:
    guide = Path(__file__).parents[3] / "docs" / "guides" / "pipelines.md"
    write(guide.read_text(encoding="utf-8").partition("```toml\n")[2].partition("```")[0])
    monkeypatch.setenv("SHOP_PASSWORD", "p")
    monkeypatch.setenv("SHOP_AWS_SECRET", "s")
    params = parsed("shop", "--once")
    assert (params["password"], params["storage_options"]["aws_secret_access_key"]) == ("p", "s")
    assert (params["every"], params["once"], params["history"]) == (10.0, True, True)


def test_a_flag_that_is_off_and_another_file() -> None:
    write(f"{BEGIN}history = false\n", "other.toml")
    assert parsed("shop", "--config", "other.toml")["history"] is False


def test_a_flag_of_the_file_is_turned_off_on_the_command_line() -> None:
    write(f"{BEGIN}history = true\nonce = true\nxattrs = true\n")
    params = parsed("shop", "--no-history", "--no-xattrs", "--no-quiet")
    assert (params["history"], params["xattrs"], params["once"], params["quiet"]) == (False, False, True, False)
    assert "No such option" in refused(URL, "--into", "lake", "--no-history")


def test_verify_takes_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "of a variable")
    store = 'storage-option = { aws_secret_access_key = "${KEY}" }'
    write(f'{BEGIN}every = "9s"\nmaster = "yarn"\ncollection = ["a.b"]\n{store}\n')
    params = verify.make_context("verify", ["shop"]).params
    assert params["master"] is None, "how a landing runs is not how it is verified"
    assert (params["url"], params["directory"], params["collections"]) == (URL, "lake", ("a.b",))
    assert params["storage_options"] == {"aws_secret_access_key": "of a variable"}
    assert verify.make_context("verify", ["shop", "other"]).params["directory"] == "other"
    assert "evry" in refused("shop", command="verify", text=f"{BEGIN}evry = '9s'")
    assert "it has no into" in refused("shop", command="verify", text=f"[pipelines.shop]\nurl = '{URL}'")
    assert "Missing argument 'DIRECTORY'" in refused(URL, command="verify")


# --- what is refused ----------------------------------------------------------------------------------------------


@case(f"{BEGIN}evry = '5s'", "headwater.toml: pipelines.shop: there is no option evry. Did you mean every?")
@case(f"{BEGIN}storage_options = 1", "there is no option storage_options. Did you mean storage-option?")
@case(f"{BEGIN}every = 'soon'", "headwater.toml: pipelines.shop: every: 'soon' is no time: write 500ms")
@case(f"{BEGIN}metrics-port = 70000", "pipelines.shop: metrics-port: 70000 is not in the range")
@case(f"{BEGIN}history = 'yes'", "history is either on or off. Write true or false")
@case(f"{BEGIN}memory = ['1g', '2g']", "memory takes one value")
@case(f"{BEGIN}memory = {{ a = 1 }}", "memory takes no table")
@case(f"{BEGIN}memory = 2026-01-01", "memory must be text or a number")
@case(f"{BEGIN}every = 5s", "end of document after a statement (at line 4, column 10)")
@case(f"{BEGIN}into = 'twice'\n#", "headwater.toml is not valid TOML: Cannot overwrite a value (at line 4")
@case("[pipelines.shop]\ninto = 'lake'", "it has no url. Add one")
@case("[pipelines.shop]\nurl = 'localhost'\ninto = 'lake'", "pipelines.shop: the connection string is not valid")
@case(f"[pipelines.shop]\nurl = '{URL}'", "pipelines.shop: it has no into. Add it, or give it on the command line")
@case("[pipelines.shopping]\n", "headwater.toml has no pipeline 'shop'. Did you mean shopping?")
@case("[pipelines.other]\n", "has no pipeline 'shop'. A URL would begin with couchbase://")
@case("[shop]\n", "headwater.toml: 'shop' is not known. Did you mean [pipelines.shop]?")
@case("[pipelines]\nshop = 1", "pipelines must hold tables")
@case(f"{BEGIN}user = '${{NOT_SET}}'", "user needs the variable NOT_SET, which the environment does not have")
@case(f"{BEGIN}user = '${{not-a-name}}'", "user has a ${ that begins no ${NAME}")
@case(f"{BEGIN}password = '{SECRET}'", "password has a secret written out. Write ${NAME}, and put the secret")
@case(f"{BEGIN}password = '{SECRET}${{A}}'", "password has a secret written out")
@case(f"{BEGIN}tls-key-password = '{SECRET}'", "tls-key-password has a secret written out")
@case(f"{BEGIN}storage-option = {{ aws_secret_access_key = '{SECRET}' }}", "storage-option.aws_secret_access_key")
@case(f"{BEGIN}storage-option = ['azure_storage_account_key={SECRET}']", "storage-option has a secret written out")
@case(f"{BEGIN}iceberg-catalog = 'postgresql://me:{SECRET}@host/db'", "iceberg-catalog has a secret written out")
@case("\xff" * 2_000_000, "headwater.toml has more than 1 MiB")
@case("a = " + "[" * 100_000, "headwater.toml is not valid TOML")
def test_one_sentence(text: str, sentence: str) -> None:
    assert sentence in refused("shop", text=text)


def test_a_name_and_no_file() -> None:
    assert refused("localhost/shop") == (
        "'localhost/shop' is not a URL, and there is no headwater.toml with a pipeline of that name. "
        "Write couchbase://host/bucket, or name the file with --config"
    )


def test_a_url_and_a_file() -> None:
    write(BEGIN)
    assert "--config is for a pipeline, which is given by its name and not by a URL" in refused(
        URL, "--config", FILE_NAME
    )


# --- several at once ----------------------------------------------------------------------------------------------


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWATER_UI_TOKEN", "a-token-of-some-length")
    write(f"{BEGIN}history = true\n[pipelines.hotel]\nurl = '{URL}'\ninto = 'hotels'\nevery = '9s'\n")


def several(*arguments: str) -> dict[str, dict[str, Any]]:
    """What each would be called with."""
    return {name: one.params for name, one in land.make_context("land", [*arguments]).params["several"].items()}


@pytest.mark.usefixtures("two")
def test_several_names_are_a_command_line_each() -> None:
    options = ("--once", "--copy-on-write", "--storage-option", "a=b", "--storage-option=c=d=e", "--no-history")
    both = several("hotel", *options, "shop", "hotel")
    assert [*both] == ["hotel", "shop"]
    assert both == {name: parsed(name, *options) for name in both}
    assert both["shop"]["storage_options"] == {"a": "b", "c": "d=e"}
    assert (both["hotel"]["into"], both["hotel"]["every"], both["shop"]["every"]) == ("hotels", 9.0, 5.0)
    assert several("--all") == {name: parsed(name) for name in ("shop", "hotel")}
    # A word that belongs to an option is no name.
    assert several("shop", "--user", "hotel", "hotel")["shop"]["user"] == "hotel"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("shop", "hotel", "--into", "x"), "--into is for one pipeline: write it into headwater.toml"),
        (("--all", "--collection", "a.b"), "--collection is for one pipeline"),
        (("--all", "shop"), "--all is for all pipelines, and takes no NAME"),
        (("shop", URL), "given by their names in a file, and not by URLs"),
        (("shop", "hotl"), "has no pipeline 'hotl'. Did you mean hotel?"),
        (("--all", "--every", "soon"), "'soon' is no time"),
        (("--all", "--config", "other.toml"), "other.toml has no pipelines"),
        (("--all", "--ui", "1", "--metrics-port", "0"), "0 is not in the range"),
    ],
)
@pytest.mark.usefixtures("two")
def test_what_several_can_not_have(arguments: tuple[str, ...], sentence: str) -> None:
    write("", "other.toml")
    assert sentence in refused(*arguments)


def test_no_file_and_too_many_pipelines() -> None:
    assert refused("--all") == "there is no headwater.toml. Name another file with --config"
    text = "".join(f"[pipelines.p{number}]\nurl = '{URL}'\ninto = 'l{number}'\n" for number in range(65))
    assert "at most 64 pipelines, not 65" in refused("--all", text=text)


@pytest.mark.parametrize(
    ("shop", "hotel", "sentence"),
    [
        (
            "ui = '1'",
            "ui = '2'",
            "shop and hotel differ in --ui, which a process has once. Give it on",
        ),
        ("runner = 'spark'", "runner = 'local'", "differ in --runner"),
        ("ui-token = '${A}'", "ui-token = '${B}'", "differ in --ui-token"),
        ("", "into = 'lake/'", "the pipelines shop and hotel land into the same place"),
        ("", "into = 'x'\ncolumns = 'n NONSENSE'", "hotel: "),
    ],
)
def test_pipelines_that_do_not_go_together(
    shop: str, hotel: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A", f"{SECRET} of the one")
    monkeypatch.setenv("B", f"{SECRET} of the other")
    hotel = hotel if "into" in hotel else f"into = 'hotels'\n{hotel}"
    assert sentence in refused("--all", "--once", text=f"{BEGIN}{shop}\n[pipelines.hotel]\nurl = '{URL}'\n{hotel}\n")


def test_all_are_verified_whatever_comes_of_one(tmp_path: Path) -> None:
    write(BEGIN + f"[pipelines.hotel]\nurl = '{URL}'\ninto = 'hotels'\n")
    result = CliRunner().invoke(main, ["verify", "--all"])
    assert result.exit_code == 1
    told = result.output.splitlines()
    assert [line for line in told if not line.startswith("Error")] == ["shop:", "hotel:"]
    assert len(told) == 4
