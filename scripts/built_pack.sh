#!/bin/sh
# Prints the path of build/libflashtune.pack, which scripts/make_pack.sh makes unless somebody put
# another there, and nothing where there is none or PACK is no. Fails if the templates are newer: the
# library would refuse such a pack.
set -eu
cd "$(dirname "$0")/.."
pack=build/libflashtune.pack
[ -f $pack ] && [ "${PACK-}" != no ] || exit 0
newer=$(find templates Cargo.toml -newer $pack -type f | head -n 1)
if [ -n "$newer" ]; then
    echo "$pack is older than $newer; delete it, and 'make pack' makes one" >&2
    exit 1
fi
echo "$PWD/$pack"
