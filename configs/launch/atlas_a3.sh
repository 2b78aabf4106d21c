#!/usr/bin/env bash
# Atlas A3: 8 packages of 2 dies in a node, and each die is a device.  Run it on every node; --help tells the rest.
set -euo pipefail
MACHINE="Atlas A3"
DEVICES_PER_NODE=16
RANK_TABLE_VERSIONS="1.2 1.0" # 1.2: a SuperPoD, 1.0: nodes on a common network
# shellcheck source=launch.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
