"""What the emulator reports. Knows no kernel."""


class KernelFault(Exception):
    """A kernel that Metal would refuse, or that does what Metal leaves undefined."""
