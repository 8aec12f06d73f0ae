"""The draft context is sized by what its own model was trained for."""

from instrumentation.findings import FindingLog
from instrumentation.following import Extents, require_room
from instrumentation.ownership import Owner

findings = FindingLog()
target = Extents(Owner("target"), {"positions": 1024, "cells": 4096})
draft = Extents(Owner("draft"), {"positions": 512, "cells": 4096})
require_room(draft, target, findings)
