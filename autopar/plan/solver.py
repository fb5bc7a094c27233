"""A small mixed-integer model over HiGHS: named columns, rows added one by one, solved once."""

from __future__ import annotations

from collections.abc import Iterable

import highspy
import numpy as np

from autopar.errors import PlanError


class Model:
    """Minimise a linear cost over binaries and non-negative reals under linear rows."""

    def __init__(self) -> None:
        self.cost: list[float] = []
        self.integer: list[bool] = []
        self.upper: list[float] = []
        self.rows: list[tuple[float, float, list[int], list[float]]] = []

    def binary(self, cost: float = 0.0) -> int:
        """A new 0/1 column; its number."""
        return self._column(cost, 1.0, True)

    def real(self, cost: float = 0.0) -> int:
        """A new column in [0, 1]."""
        return self._column(cost, 1.0, False)

    def _column(self, cost: float, upper: float, integer: bool) -> int:
        self.cost.append(cost)
        self.upper.append(upper)
        self.integer.append(integer)
        return len(self.cost) - 1

    def row(self, terms: Iterable[tuple[int, float]], low: float, high: float) -> None:
        """``low <= sum of coefficient * column <= high``; terms of one column add up."""
        table: dict[int, float] = {}
        for column, coefficient in terms:
            table[column] = table.get(column, 0.0) + coefficient
        self.rows.append((low, high, list(table), list(table.values())))

    def solve(self, seconds: float = 3600.0, gap: float = 1e-6, what: str = "choosing shardings") -> list[float]:
        """The values of all columns at the optimum. Raises PlanError where there is none.

        ``seconds`` only ends what would never end: the best of what was found till then would be another choice on another rank.
        """
        if not self.cost and all(low <= 0.0 <= high for low, high, *_ in self.rows):
            return []  # the solver calls a model without columns neither solved nor infeasible
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(self.cost), len(self.rows)
        lp.col_cost_ = np.array(self.cost)
        lp.col_lower_ = np.zeros(len(self.cost))
        lp.col_upper_ = np.array(self.upper)
        lp.row_lower_ = np.array([r[0] for r in self.rows])
        lp.row_upper_ = np.array([r[1] for r in self.rows])
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.cumsum([0, *(len(r[2]) for r in self.rows)])
        lp.a_matrix_.index_ = np.array([c for r in self.rows for c in r[2]])
        lp.a_matrix_.value_ = np.array([v for r in self.rows for v in r[3]])
        lp.integrality_ = [highspy.HighsVarType.kInteger if i else highspy.HighsVarType.kContinuous for i in self.integer]
        solver = highspy.Highs()
        solver.setOptionValue("log_to_console", False)
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("time_limit", seconds)
        solver.setOptionValue("mip_rel_gap", gap)
        solver.setOptionValue("threads", 1)  # one thread: the same choice on every rank
        solver.setOptionValue("random_seed", 0)
        solver.passModel(lp)
        solver.run()
        status = solver.getModelStatus()
        if status == highspy.HighsModelStatus.kTimeLimit:
            raise PlanError(f"{what} took longer than {seconds:g} s", hint="leave less to choose: pin some of it in the Plan")
        if status != highspy.HighsModelStatus.kOptimal:
            raise PlanError(f"{what}: nothing satisfies the constraints ({solver.modelStatusToString(status)})")
        return list(solver.getSolution().col_value)
