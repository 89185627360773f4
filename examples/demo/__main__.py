"""`python -m examples.demo`: parse, run, print, exit. See docs/demo.md."""

from __future__ import annotations

import signal
import sys
from types import FrameType

from examples.demo.options import VOCABULARY, parse
from examples.demo.summary import for_people

EXIT_WRONG, EXIT_INTERRUPTED = 1, 130


class _Interrupts:
    """SIGINT and SIGTERM as KeyboardInterrupt, and whether one came.

    Python drops what is raised while it runs hooks of a fork, or collects garbage: then the flag is
    all that is left of it, and whoever waits looks at it.
    """

    def __init__(self) -> None:
        self.came = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.came = True
        raise KeyboardInterrupt

    def check(self) -> None:
        """Raise where one came and was dropped."""
        if self.came:
            raise KeyboardInterrupt


def main() -> int:
    """Run the demo; return its exit code."""
    options = parse(sys.argv[1:])
    if not options.tokenizer.exists():
        wanted = "make setup" if options.tokenizer == VOCABULARY else "--tokenizer PATH"
        print(f"demo: there is no {options.tokenizer}; run {wanted}", file=sys.stderr)
        return EXIT_WRONG
    # Behind the command line: --help and a wrong option answer at once.
    from examples.demo.run import Demo, DemoFailed
    from examples.demo.show import Show

    interrupts = _Interrupts()
    engine = "a stand-in for a model" if options.simulated else ", ".join(options.urls)
    title = f"Rollstream demo: Valkey, producer, 2 workers, verifier, trainer; engine: {engine}"
    try:
        with Show(title, options.json) as show:
            outcome = Demo(options, show, interrupts.check).run()
    except KeyboardInterrupt:
        print("demo: stopped; every process that it started was ended", file=sys.stderr)
        return EXIT_INTERRUPTED
    except DemoFailed as error:
        print(f"demo: {error}", file=sys.stderr)
        return EXIT_WRONG
    text = for_people(outcome.summary, outcome.facts, outcome.wrong)
    print(text, file=sys.stderr if options.json else sys.stdout)
    if options.json:
        print(outcome.summary.to_json())
    return EXIT_WRONG if outcome.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
