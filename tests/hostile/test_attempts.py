"""Whatever a command is given, it ends well or says in one line what is wrong, within bounds and without harm."""

from collections import Counter

import pytest
from attempts import Server, broken, serving
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inputs import KINDS, OF_A_RUN, make_run, right_result

EVERY = {**KINDS, **OF_A_RUN}
LOOSE = settings(max_examples=200, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def server():
    with serving() as found:
        yield found


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run") / "run")


@pytest.mark.slow
@pytest.mark.parametrize("kind", EVERY)
def test_every_attempt_keeps_the_rule(server: Server, run, kind):
    codes: Counter[int] = Counter()

    @LOOSE
    @given(data=st.data())
    def attempt(data):
        server.workspace.clear()
        argv = data.draw(EVERY[kind](server.workspace, *([run] if kind in OF_A_RUN else [])))
        found = server.attempt(argv)
        wrong = broken(found) or right_result(found)
        assert wrong is None, f"{wrong}\n{found.environment} {found.argv}\n{found.err[-2000:]}"
        codes[found.code] += 1

    attempt()
    if kind != "surroundings":  # in which a command that is right may well succeed
        assert codes[2] > 10  # what is generated is wrong often enough to show something
