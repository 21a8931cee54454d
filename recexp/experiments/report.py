"""Execute an experiment's notebook into a run's folder, and make a report of it that needs nothing from elsewhere."""

import logging
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
import papermill
from ipykernel.kernelspec import get_kernel_dict
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient.exceptions import DeadKernelError
from nbconvert import HTMLExporter

from recexp.registry import nearest


class NotebookError(RuntimeError):
    """A cell of a notebook failed; what ran so far is in the executed notebook."""


class ThisPython(AsyncKernelManager):
    """Starts this very interpreter, whatever a kernel specification called python3 in the user's folders points to."""

    transport_encryption = "auto"  # where both ends know it; without, newer kernels warn

    async def _async_launch_kernel(self, kernel_cmd: list[str], **options: Any) -> None:
        """Without the kernel's stderr: cells print another way, and a kernel that is told to stop complains there."""
        await super()._async_launch_kernel(kernel_cmd, stderr=subprocess.DEVNULL, **options)

    @property
    def kernel_spec(self) -> KernelSpec:
        return KernelSpec(**get_kernel_dict())


def _literal(path: Path | str) -> str:
    """For papermill, which fills in what stands in braces."""
    return str(path).replace("{", "{{").replace("}", "}}")


def check_parameters(notebook: Path | str, parameters: Mapping[str, Any]) -> None:
    """ValueError for a parameter that the notebook's cell tagged "parameters" does not set."""
    known = list(papermill.inspect_notebook(_literal(notebook)))
    for name in parameters:
        if name not in known:
            raise ValueError(f"{Path(notebook).name} has no parameter {name!r}; {nearest(name, known)}")


def execute(notebook: Path | str, parameters: Mapping[str, Any], run_dir: Path | str, quiet: bool = False) -> Path:
    """Run the notebook with these parameters; writes <run_dir>/notebook.ipynb, then report.html, whose path it returns.

    ValueError as of check_parameters. NotebookError with the cell and its error when one fails; the notebook as far as
    it came then lies in run_dir, and no report.
    """
    check_parameters(notebook, parameters)
    executed = Path(run_dir) / "notebook.ipynb"
    try:
        papermill.execute_notebook(
            _literal(notebook), _literal(executed), dict(parameters), progress_bar=not quiet, kernel_name="python3",
            language="python", kernel_manager_class=ThisPython,
        )  # fmt: skip
    except papermill.PapermillExecutionError as error:
        cell = f"cell [{error.exec_count}] of {executed}, {error.source.splitlines()[0]!r}"
        raise NotebookError(f"{cell}, failed: {error.ename}: {error.evalue}") from error
    except DeadKernelError as error:
        raise NotebookError(f"the kernel died, perhaps out of memory; as far as it came: {executed}") from error
    return write_report(executed, quiet)


def _without_progress(cell: Any) -> dict[str, Any]:
    """A code cell's outputs without dead progress bars, names of files that the finished run renames, and warnings of
    libraries, which name folders of this machine."""
    kept = []
    for output in cell.get("outputs", []):
        if output.get("name") == "stderr":
            continue
        if output.get("name") == "stdout":
            output.text = "".join(line for line in output.text.splitlines(True) if not line.startswith("wrote "))
        bar = "application/vnd.jupyter.widget-view+json" in output.get("data", {})
        if not bar and output.get("text", "-"):
            kept.append(output)
    return {"outputs": kept} if cell.cell_type == "code" else {}


def write_report(executed: Path, quiet: bool = False) -> Path:
    """Strip an executed notebook of what differs from run to run without meaning (times, progress, the path of its own
    folder), in place, and write report.html beside it: one file, no scripts or styles from elsewhere (so formulas stay
    as they are written)."""
    node = nbformat.read(executed, as_version=4)
    for part in (node, *node.cells):
        for name in ("papermill", "execution", "widgets"):
            part.metadata.pop(name, None)
    for cell in node.cells:
        cell.update(_without_progress(cell))
        cell.source = cell.source.replace(str(executed.parent), ".")  # where papermill put the parameters
    nbformat.write(node, executed)
    quiet_log = logging.getLogger(__name__)
    quiet_log.setLevel(logging.ERROR)  # it warns of every figure that has no text in its place
    exporter = HTMLExporter(template_name="lab", embed_images=True, log=quiet_log)
    exporter.exclude_input_prompt = exporter.exclude_output_prompt = True
    html, _ = exporter.from_notebook_node(node)
    html = re.sub(r"<script\b.*?</script>", "", html, flags=re.DOTALL)
    report = executed.with_name("report.html")
    report.write_text(html)
    if not quiet:
        print(f"wrote {report}")
    return report
