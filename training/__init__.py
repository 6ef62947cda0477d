"""What every run has, whatever it trains: options, launch, checkpoints, evaluation, tracking, terminal, report."""

from components.heartbeat import listen
from core import beat

listen(beat)  # so that core's watch for hangs sees what components do
