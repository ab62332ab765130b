"""`gpurun stacks` for a person: pure."""

from gpurun.launcher.inspect.frames import OURS
from gpurun.launcher.inspect.hang_diagnosis import Hang, RankView
from gpurun.launcher.inspect.stacks import Frame, Stack
from gpurun.launcher.units import plural


def render_stacks(launch: str, seen: Hang) -> str:
    """What each rank does, with the main thread's stack, innermost call first; the finding at the end."""
    if not seen.ranks:
        return f"{launch}: no rank has begun yet"
    parts = [f"{launch}: {plural(len(seen.ranks), 'rank')}"]
    parts += [_rank(view) for view in seen.ranks]
    if seen.headline:
        parts.append(f"{seen.headline[0].upper()}{seen.headline[1:]}.")
    return "\n\n".join(parts)


def _rank(view: RankView) -> str:
    newest = ", ".join(map(str, view.collectives))
    called = f"; last collective: {newest}" if newest else ""
    lines = [f"rank {view.rank} (process {view.pid}, {plural(view.steps, 'step')}{called}) {view.doing}"]
    main = view.threads[0].frames if view.threads else ()
    lines += [f"    {frame}" for frame in outside_launcher(main)]
    others = len(view.threads) - 1
    if others > 0:
        lines.append(f"    (and {plural(others, 'other thread')}: --json shows them)")
    return "\n".join(lines)


def outside_launcher(frames: Stack) -> tuple[Frame, ...]:
    """A stack without what lies below a program: how gpurun has started it."""
    shown = list(frames)
    while len(shown) > 1 and shown[-1].file.startswith((OURS, "<frozen ")):
        shown.pop()
    return tuple(shown)
