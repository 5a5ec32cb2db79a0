#!/bin/sh
# Copies the built library, header, command line and their descriptions into a prefix. `make
# install` builds them first and calls this script, which builds nothing.
#
# usage: install.sh [--check | --uninstall] PREFIX LIBDIR DESTDIR CLI
#
# --check  checks the arguments and does nothing else; `make install` does that before it builds
# PREFIX   absolute; the program finds nothing by it, so the folder may be moved
# LIBDIR   lib, lib64 or lib/x86_64-linux-gnu, below PREFIX
# DESTDIR  put before PREFIX, for packages; may be empty
# CLI      the command line's program
#
# FLASHTUNE_BUILT names the folder of the built libraries, target/release by default. `make sbom`
# makes the list of their crates. build/libflashtune.pack goes beside the library where it is there,
# unless PACK is no.
set -eu
cd "$(dirname "$0")/.."

fail() { echo "install.sh: $1" >&2; exit 1; }

uninstall=no only_check=no
case ${1-} in
--uninstall) uninstall=yes; shift ;;
--check) only_check=yes; shift ;;
esac
[ $# = 4 ] || fail "it takes PREFIX, LIBDIR, DESTDIR and CLI; see the head of this file"
prefix=$1 libdir=$2 destdir=$3 cli=$4

case $(uname -s) in Linux) ;; *) fail "it knows the names of shared libraries on Linux only" ;; esac
# Some shells do not expand the tilde of PREFIX=~/folder, since it is not at the start of a word.
# make then passes it on in quotes.
case $prefix in "~/"*) prefix=$HOME/${prefix#"~/"} ;; esac
case $prefix in /*) ;; *) fail "PREFIX is $prefix; it must be an absolute path" ;; esac
case $libdir in '' | /* | *..*) fail "LIBDIR is '$libdir'; it must be a path below PREFIX" ;; esac
[ $only_check = no ] || exit 0

version=$(sed -n 's/^version = "\(.*\)"$/\1/p' Cargo.toml | head -n 1)
major=${version%%.*} rest=${version#*.}
minor=${rest%%.*}
abi=$major.$minor
[ "$major" = 0 ] || abi=$major
built=${FLASHTUNE_BUILT:-target/release}
# What rustc names by `--print native-static-libs`.
private_libs="gcc_s util rt pthread m dl c"

root=$destdir$prefix
lib=$root/$libdir
up=$(echo "$libdir" | sed 's|[^/][^/]*|..|g')

# The installed files, by which `uninstall` removes them: names below $lib, and names below $root.
# They are split at spaces, so neither folder is part of them.
of_lib="libflashtune.so.$version libflashtune.so.$abi libflashtune.so libflashtune.a libflashtune.pack
pkgconfig/flashtune.pc cmake/flashtune/flashtuneConfig.cmake cmake/flashtune/flashtuneConfigVersion.cmake"
of_root="include/flashtune.h include/flashtune.hpp bin/flashtune
share/bash-completion/completions/flashtune share/zsh/site-functions/_flashtune
share/fish/vendor_completions.d/flashtune.fish
share/doc/flashtune/LICENSE-MIT share/doc/flashtune/LICENSE-APACHE share/doc/flashtune/flashtune.cdx.json"

if [ $uninstall = yes ]; then
    for file in $of_lib; do rm -f "$lib/$file"; done
    for file in $of_root; do rm -f "$root/$file"; done
    rm -f "$root"/share/man/man1/flashtune.1 "$root"/share/man/man1/flashtune-*.1
    rmdir "$lib/cmake/flashtune" "$root/share/doc/flashtune" 2> /dev/null || true
    echo "removed flashtune $version from $root"
    exit 0
fi

for file in "$built/libflashtune.so" "$built/libflashtune.a" "$cli" build/flashtune.cdx.json; do
    [ -f "$file" ] || fail "$file is missing; run 'make install', which builds it"
done
pack=$(sh scripts/built_pack.sh)

mkdir -p "$root/bin" "$root/include" "$lib/pkgconfig" "$lib/cmake/flashtune" "$root/share/doc/flashtune" \
    "$root/share/man/man1" "$root/share/bash-completion/completions" "$root/share/zsh/site-functions" \
    "$root/share/fish/vendor_completions.d"

install -m 755 "$built/libflashtune.so" "$lib/libflashtune.so.$version"
ln -sf "libflashtune.so.$version" "$lib/libflashtune.so.$abi"
ln -sf "libflashtune.so.$abi" "$lib/libflashtune.so"
install -m 644 "$built/libflashtune.a" "$lib/libflashtune.a"
rm -f "$lib/libflashtune.pack"  # of an earlier version
[ -z "$pack" ] || install -m 644 "$pack" "$lib/libflashtune.pack"
install -m 644 include/flashtune.h include/flashtune.hpp "$root/include/"
install -m 755 "$cli" "$root/bin/flashtune"
install -m 644 LICENSE-MIT LICENSE-APACHE build/flashtune.cdx.json "$root/share/doc/flashtune/"

fill() {
    sed -e "s|@VERSION@|$version|g" -e "s|@MAJOR@|$major|g" -e "s|@MINOR@|$minor|g" \
        -e "s|@PREFIX_FROM_PC@|../$up|g" -e "s|@INCLUDEDIR@|include|g" -e "s|@INCLUDEDIR_FROM_LIBDIR@|$up/include|g" \
        -e "s|@SHARED@|libflashtune.so.$version|g" -e "s|@SONAME@|libflashtune.so.$abi|g" \
        -e "s|@STATIC@|libflashtune.a|g" \
        -e "s|@PRIVATE_LIBS@|$(for name in $private_libs; do printf -- '-l%s ' "$name"; done | sed 's/ $//')|g" \
        -e "s|@CMAKE_PRIVATE_LIBS@|$(echo "$private_libs" | tr ' ' ';')|g" \
        "packaging/$1.in" > "$2/$1"
    chmod 644 "$2/$1"
}
fill flashtune.pc "$lib/pkgconfig"
fill flashtuneConfig.cmake "$lib/cmake/flashtune"
fill flashtuneConfigVersion.cmake "$lib/cmake/flashtune"

"$cli" completions bash > "$root/share/bash-completion/completions/flashtune"
"$cli" completions zsh > "$root/share/zsh/site-functions/_flashtune"
"$cli" completions fish > "$root/share/fish/vendor_completions.d/flashtune.fish"
"$cli" man "$root/share/man/man1"

echo "installed flashtune $version in $root"
