# Needs Rust, a C compiler and Python 3; no CUDA toolkit.
CC ?= cc
CFLAGS ?= -std=c99 -D_POSIX_C_SOURCE=200809L -O2 -Wall -Wextra
PYTHON ?= python3
EXAMPLES := $(patsubst examples/c/%.c,build/examples/%,$(wildcard examples/c/*.c))

.PHONY: all lib cli examples demo test bench header table prose clean
.NOTPARALLEL:

all: lib cli

# The C library, built alone: cargo silently drops fat LTO where an rlib is built along with it.
lib:
	cargo rustc --locked --release --lib --no-default-features --crate-type cdylib -- -C strip=symbols

# In a folder of its own, since building the command line builds the library too, without LTO, under the same name. LTO
# would double the wait for a program that only waits for kernels.
cli: export CARGO_PROFILE_RELEASE_LTO = off
cli: export CARGO_PROFILE_RELEASE_CODEGEN_UNITS = 16
cli:
	cargo build --locked --release --target-dir target/cli --bin flashtune

examples: $(EXAMPLES)

build/examples/%: examples/c/%.c $(wildcard examples/c/*.h) include/flashtune.h
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -I include $< -o $@ -L target/release -lflashtune -lm -ldl -Wl,-rpath,'$(CURDIR)/target/release:$$ORIGIN/../lib'

# Tunes GPT-2's attention on the GPU if there is one, else on the CPU; the second run starts from the first one's record.
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
