"""AMX tile instructions on any Linux x86-64 machine: an emulator, and a model of the manual to check it against."""

from .emulation import emulate
from .model import IllegalInstruction, ProtectionFault, Tiles, tile_config

__all__ = ["IllegalInstruction", "ProtectionFault", "Tiles", "emulate", "tile_config"]
