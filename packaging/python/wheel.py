#!/usr/bin/env python3
"""Packs the program as a wheel, which puts it on the PATH of an environment.

Usage: wheel.py <version> <program> <platform> <readme> <folder for the wheel>
"""

import base64
import hashlib
import sys
import zipfile
from pathlib import Path

METADATA = """Metadata-Version: 2.1
Name: oncebox
Version: {version}
Summary: Exactly-once database effects of Kafka messages, by uploaded WebAssembly handlers
License: MIT OR Apache-2.0
Requires-Python: >=3.8
Description-Content-Type: text/markdown

{readme}"""

WHEEL = """Wheel-Version: 1.0
Generator: oncebox
Root-Is-Purelib: false
Tag: py3-none-{platform}
"""


def main() -> None:
    version, program, platform, readme, folder = sys.argv[1:]
    name = f"oncebox-{version}"
    files = {
        f"{name}.data/scripts/oncebox": Path(program).read_bytes(),
        f"{name}.dist-info/METADATA": METADATA.format(
            version=version, readme=Path(readme).read_text()
        ).encode(),
        f"{name}.dist-info/WHEEL": WHEEL.format(platform=platform).encode(),
    }
    record = []
    for path, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        record.append(f"{path},sha256={digest},{len(content)}")
    record.append(f"{name}.dist-info/RECORD,,")
    files[f"{name}.dist-info/RECORD"] = ("\n".join(record) + "\n").encode()
    wheel = Path(folder) / f"{name}-py3-none-{platform}.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in files.items():
            # One date for all, so that equal content is an equal file.
            entry = zipfile.ZipInfo(path, (1980, 1, 1, 0, 0, 0))
            entry.external_attr = (0o100755 if path.endswith("scripts/oncebox") else 0o100644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, content)
    print(wheel)


if __name__ == "__main__":
    main()
