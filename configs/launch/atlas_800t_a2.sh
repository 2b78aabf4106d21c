#!/usr/bin/env bash
# Atlas 800T A2: 8 devices in a node.  Run it on every node; --help tells the rest.
set -euo pipefail
MACHINE="Atlas 800T A2"
DEVICES_PER_NODE=8
RANK_TABLE_VERSIONS="1.0"
# shellcheck source=launch.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
