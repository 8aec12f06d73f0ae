"""The fault drill: plant every fault of the catalogue in a run of target and draft, and see who finds it, and where."""

from refengine.drill.catalogue import FAULTS, fault_of, faults_of
from refengine.drill.fault import Fault
from refengine.drill.running import Drill
from refengine.drill.verdict import Row, Status

__all__ = ["FAULTS", "Drill", "Fault", "Row", "Status", "fault_of", "faults_of"]
