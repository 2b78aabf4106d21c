"""mindspeed-cp doctor over the stand-in, with some of the long cases, of which most take seconds."""

from __future__ import annotations

from tests.npu.command import main

if __name__ == "__main__":
    from mindspeed_cp import doctor

    doctor.LONG_CASES = (*doctor.LONG_CASES[:2], *doctor.LONG_CASES[-4:])
    main()
