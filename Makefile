# Needs Rust, a C compiler and Python 3; no CUDA toolkit.
CC ?= cc
CFLAGS ?= -std=c99 -D_POSIX_C_SOURCE=200809L -O2 -Wall -Wextra
PYTHON ?= python3
PREFIX ?= /usr/local
LIBDIR ?= lib
, := ,
VERSION := $(shell sed -n 's/^version = "\(.*\)"$$/\1/p' Cargo.toml | head -n 1)
# Before 1.0 each minor version may change the ABI.
ABI := $(if $(filter 0,$(firstword $(subst ., ,$(VERSION)))),$(basename $(VERSION)),$(firstword $(subst ., ,$(VERSION))))
EXAMPLES := $(patsubst examples/c/%.c,build/examples/%,$(wildcard examples/c/*.c))

.PHONY: all lib cli pack examples install places uninstall wheel sbom demo test bench header table prose clean
.NOTPARALLEL:

all: lib cli

# The C library, shared and static, built without an rlib: cargo silently drops fat LTO where one is
# built along. The SONAME sends programs to the versioned name, which a link gives to the file in
# the build folder too. The folder is target/, whatever CARGO_TARGET_DIR says, since the examples and
# the installation take the library from there.
lib:
	cargo rustc --locked --release --target-dir target --lib --no-default-features --crate-type cdylib,staticlib -- -C strip=symbols $(SONAME)
	$(if $(SONAME),ln -sf libflashtune.so target/release/libflashtune.so.$(ABI))

SONAME := $(if $(filter Linux,$(shell uname -s)),-C link-arg=-Wl$(,)-soname$(,)libflashtune.so.$(ABI))

# In a folder of its own, since building the command line builds the library too, without LTO, under
# the same name. LTO would double the wait for a program that only waits for kernels.
cli: export CARGO_PROFILE_RELEASE_LTO = off
cli: export CARGO_PROFILE_RELEASE_CODEGEN_UNITS = 16
cli:
	cargo build --locked --release --target-dir target/cli --bin flashtune

# The kernels of the preset "common", compiled ahead of time: with this file beside the library, the
# first call of such a problem compiles nothing. Needs NVRTC. `make wheel` and `make install` make it
# too, where it is older than its sources; PACK=no leaves it out. PACK_ARCH names architectures, as
# sm_80,sm_90a; else those of the pack before are made, at first sm_90a. PACK_PRESET names a preset in
# place of `common`, and later calls keep it too.
pack:
	sh scripts/make_pack.sh "$(PACK_ARCH)" build/libflashtune.pack

PACK_ARCH ?=
PACK_PRESET ?=
PACK ?= yes
export PACK PACK_ARCH PACK_PRESET

examples: $(EXAMPLES)

build/examples/%: examples/c/%.c $(wildcard examples/c/*.h) include/flashtune.h
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -I include $< -o $@ -L target/release -lflashtune -lm -ldl -Wl,-rpath,'$(CURDIR)/target/release:$$ORIGIN/../lib'

# PREFIX, LIBDIR (below PREFIX) and DESTDIR (for packages) as usual; the installed folder may be
# moved. Wrong ones are refused before anything is built.
install: places lib cli sbom
	$(if $(filter no,$(PACK)),,FLASHTUNE_CLI=target/cli/release/flashtune sh scripts/make_pack.sh "$(PACK_ARCH)" build/libflashtune.pack --if-possible)
	sh scripts/install.sh $(PLACES)

places:
	sh scripts/install.sh --check $(PLACES)

PLACES = "$(PREFIX)" "$(LIBDIR)" "$(DESTDIR)" target/cli/release/flashtune

uninstall:
	sh scripts/install.sh --uninstall $(PLACES)

# What the library is made of, as CycloneDX.
sbom:
	@mkdir -p build
	$(PYTHON) scripts/sbom.py > build/flashtune.cdx.json

# The wheel and the source distribution, in build/dist; zig, NVRTC and the Python tools come from
# PyPI.
# TARGET may name another machine: make wheel TARGET=aarch64-unknown-linux-gnu
wheel:
	TARGET=$(TARGET) sh scripts/build_wheel.sh $(SONAME)

# Tunes GPT-2's attention on the GPU if there is one, else on the CPU; the second run starts from
# the first one's record.
demo: lib examples
	build/examples/attention

test:
	sh scripts/venv.sh
	$(PYTHON) scripts/test.py

# Beside PyTorch's backends; needs a GPU and PyTorch.
bench: lib
	PYTHONPATH=bindings/python $(PYTHON) bench/attention.py

header:
	FLASHTUNE_UPDATE_HEADER=1 cargo test --locked --test capi header
	FLASHTUNE_UPDATE_MIRRORS=1 cargo test --locked --test mirrors

# The table in docs/support.md.
table:
	FLASHTUNE_UPDATE_SUPPORT=1 cargo test --locked --test numeric feature_table

# Documents and comments; examples run where the library is built.
prose:
	$(PYTHON) scripts/check_prose.py

clean:
	cargo clean
	rm -rf build .venv
