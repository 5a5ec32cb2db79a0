//! The message of the calling thread's last failed call, and the function that returns it to C.

use std::cell::RefCell;
use std::ffi::{CStr, c_char};

thread_local! {
    /// Ends in NUL after the first write. The buffer is kept, so success allocates nothing.
    static MESSAGE: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Returns why this thread's last flashtune call failed. The text is one UTF-8 sentence that names
/// the argument, its value and what is allowed. It is "" after success.
///
/// The string belongs to the library and is never NULL. It stays valid until this thread's next
/// flashtune call that returns a status. May be called from any thread, also during stream capture.
#[unsafe(no_mangle)]
pub extern "C" fn flashtune_last_error() -> *const c_char {
    // A thread that is shutting down has no message any more.
    let pointer = MESSAGE.try_with(|message| {
        let message = message.borrow();
        if message.is_empty() { c"".as_ptr() } else { message.as_ptr().cast() }
    });
    pointer.unwrap_or(c"".as_ptr())
}

pub(super) fn set(text: &str) {
    let _ = MESSAGE.try_with(|message| {
        let mut message = message.borrow_mut();
        message.clear();
        // A NUL inside the text would cut the sentence short.
        message.extend(text.bytes().filter(|byte| *byte != 0));
        message.push(0);
    });
}

pub(super) fn clear() {
    let _ = MESSAGE.try_with(|message| message.borrow_mut().clear());
}

/// The text of flashtune_last_error, for callers in Rust.
pub(crate) fn current() -> String {
    // SAFETY: the returned string ends in NUL and lives until this thread's next call.
    unsafe { CStr::from_ptr(flashtune_last_error()) }.to_string_lossy().into_owned()
}
