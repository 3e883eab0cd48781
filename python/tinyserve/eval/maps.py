"""Selection maps of a sweep: for the first sample of each task, which pages its first sparse method read."""

from __future__ import annotations

from pathlib import Path

from tinyserve.eval.runner import MethodRun
from tinyserve.eval.samples import Sample, Task
from tinyserve.selection_map import count_selection, draw_selection_map

__all__ = ["SelectionMaps"]


class SelectionMaps:
    """Draws as the runs come; given to `evaluate` as `on_run`.

    A task marks what is hidden in the context by `details["spans"]`, token positions [[start, stop], ...].

    Args:
        folder: of the pictures, `selection_map_TASK.png` and `.svg`.
    """

    def __init__(self, folder: Path, model_name: str, num_layers: int) -> None:
        self._folder = folder
        self._model_name = model_name
        self._num_layers = num_layers
        self._drawn: set[str] = set()

    def __call__(self, task: Task, sample: Sample, run: MethodRun) -> None:
        if task.name in self._drawn or not (run.engaged and any(run.selections)):
            return
        self._drawn.add(task.name)
        spans = sample.details.get("spans") or [[0, 0]]
        start, stop = spans[0]
        page_size = run.method.config.page_size
        for suffix in (".png", ".svg"):
            draw_selection_map(
                count_selection(run.selections, self._num_layers),
                self._folder / f"selection_map_{task.name}{suffix}",
                subtitle=f"{self._model_name}  ·  {task.name}, {len(sample.prompt_ids)} tokens  ·  "
                f"{run.method.label}",
                needle_pages=range(start // page_size, -(-stop // page_size)),
                step_labels=[],
            )
