"""How `gpurun runs` lists the searches of `gpurun improve`."""

from pathlib import Path

from gpurun.launcher.rundir.files import write_json
from gpurun.launcher.rundir.improvement import SCHEMA, Improvement
from gpurun.launcher.rundir.paths import IMPROVEMENT
from gpurun.launcher.tensorboard_plugin.answers.runs import past_runs


def test_a_search_is_listed_with_its_answer_in_place_of_its_runs(tmp_path: Path) -> None:
    search = tmp_path / "runs/train-improve"
    for stage in ("1-original", "2-alone"):
        (search / stage).mkdir(parents=True)
        (search / stage / "plan.json").write_text('{"name": "train"}')
    write_json(search / IMPROVEMENT, Improvement(SCHEMA, "train.py", 60.0))
    for place in (tmp_path / "runs", search):
        (found,) = past_runs([place])
        assert (found.run, found.job, found.status) == (str(search), "train.py", "stopped")
        assert found.headline == "nothing is proven to make train.py faster yet"
    write_json(search / IMPROVEMENT, Improvement(SCHEMA, "train.py", 60.0, complete=True))
    assert [each.status for each in past_runs([tmp_path])] == ["done"]
