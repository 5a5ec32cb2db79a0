//! The command line's answer to too little memory: a sentence and exit code 1.
//!
//! The standard library aborts where an allocation fails, and a signal tells an operator nothing.
//! Tensors and workspaces ask for their memory fallibly and in large pieces, so a large request
//! that fails is passed on to them. The C library has no allocator of its own.

use std::alloc::{GlobalAlloc, Layout, System};

pub struct ExitWhenExhausted;

/// Requests of this size and above may be fallible. Ordinary collections stay below it.
const MAY_FAIL_FROM: usize = 1 << 20;

fn checked(pointer: *mut u8, bytes: usize) -> *mut u8 {
    if pointer.is_null() && bytes < MAY_FAIL_FROM {
        let message = b"flashtune: out of memory\n";
        // SAFETY: the message is valid for its length; neither call allocates or runs handlers.
        unsafe {
            libc::write(libc::STDERR_FILENO, message.as_ptr().cast(), message.len());
            libc::_exit(1);
        }
    }
    pointer
}

// SAFETY: every call goes to the system's allocator with the arguments that came in.
unsafe impl GlobalAlloc for ExitWhenExhausted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise on `layout`.
        checked(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise on `layout`.
        checked(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller's promise on all three.
        checked(unsafe { System.realloc(pointer, layout, size) }, size)
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise on both.
        unsafe { System.dealloc(pointer, layout) }
    }
}
