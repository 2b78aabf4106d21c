#!/bin/sh
# Prints the Python that the environment is made with: $1 if given, else the first of the usual names that runs, is 3.10, 3.11 or 3.12
# and can make virtual environments.  Each is started to find out: a name on PATH may be a shim that leads nowhere.
check='
import sys
if not (3, 10) <= sys.version_info[:2] <= (3, 12):
    sys.exit("it is Python %d.%d" % sys.version_info[:2])
try:
    import ensurepip, venv
except ImportError as error:
    sys.exit("it has no module %s (Debian and Ubuntu: apt install python3-venv)" % error.name)
print(sys.executable)
'
wanted=$1
if [ -n "$wanted" ]; then
    set -- "$wanted"
else
    set -- python3 python3.12 python3.11 python3.10 python
fi
tried=""
for name in "$@"; do
    if answer=$("$name" -c "$check" 2>&1 </dev/null); then
        echo "$answer"
        exit 0
    fi
    if command -v "$name" >/dev/null 2>&1; then
        tried="$tried
  $name: $(echo "$answer" | head -n 1)"
    fi
done
if [ -n "$wanted" ]; then
    echo "PYTHON=$wanted cannot be used:${tried:- not found}" >&2
    echo "Valid: Python 3.10, 3.11 or 3.12 with the venv module." >&2
else
    echo "No Python 3.10, 3.11 or 3.12 with the venv module was found; install one, or name it: make PYTHON=/path/to/python" >&2
    [ -z "$tried" ] || echo "Tried:$tried" >&2
fi
exit 1
