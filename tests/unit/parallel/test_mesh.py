import pytest

from ttv_train.config_file import parse_config
from ttv_train.errors import UserError
from ttv_train.parallel.mesh import check_degrees


def parallel(degree: int):
    sequence = {"scheme": "ulysses", "degree": degree}
    return parse_config({"parallel": {"sequence": sequence}}).parallel


@pytest.mark.parametrize(("degree", "world_size"), [(1, 1), (1, 3), (2, 4), (4, 4)])
def test_degrees_that_divide_are_accepted(degree, world_size):
    check_degrees(parallel(degree), world_size)


def test_a_degree_that_does_not_divide_is_refused_with_the_mend():
    with pytest.raises(UserError, match=r"parallel\.sequence\.degree 2 does not divide the 3 process"):
        check_degrees(parallel(2), 3)


def test_too_few_processes_name_the_launcher_trap():
    with pytest.raises(UserError, match="--multi_gpu --num_machines 1 --num_processes 4"):
        check_degrees(parallel(4), 1)
