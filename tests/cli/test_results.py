"""Results are printed whatever else fails, and what failed is named."""

from pathlib import Path

import pytest

from streamh2o.cli.results import give_results
from streamh2o.errors import UsageError, UserError


def failing():
    raise RuntimeError("no  font")


def test_a_result_is_printed_and_other_files_written_although_two_files_fail(tmp_path, capsys):
    written = []
    with pytest.raises(UserError) as raised:
        give_results(
            tmp_path / "missing" / "a.json", "{}\n", lambda: print("shown"), [failing, lambda: written.append(1)]
        )
    assert capsys.readouterr().out == "shown\n"
    assert written == [1]
    assert "a.json" in str(raised.value)
    assert "RuntimeError: no font." in str(raised.value)
    assert raised.value.exit_code == 1


def test_json_takes_the_place_of_what_is_shown(capsys):
    give_results(Path("-"), "{}\n", lambda: print("shown"))
    assert capsys.readouterr().out == "{}\n"


def test_what_ended_the_run_is_raised_after_its_results_were_given(tmp_path, capsys):
    failure = UsageError("too short")
    with pytest.raises(UsageError) as raised:
        give_results(tmp_path / "a.json", "{}\n", lambda: print("shown"), failure=failure)
    assert raised.value is failure
    assert (tmp_path / "a.json").read_text() == "{}\n"
    assert capsys.readouterr().out == "shown\n"
    with pytest.raises(UsageError, match="too short RuntimeError"):
        give_results(None, "", lambda: None, [failing], failure)


def test_ctrl_c_while_a_file_is_written_is_not_kept_back():
    def stopped():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        give_results(None, "", lambda: None, [stopped])
