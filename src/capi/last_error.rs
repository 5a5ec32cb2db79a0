//! The sentence of this thread's last failed call.

use std::cell::RefCell;
use std::ffi::c_char;

thread_local! {
    /// Ends in NUL once it was written; the buffer is kept, so that success costs no allocation.
    static MESSAGE: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Why this thread's last flashtune call failed, as one sentence in UTF-8 that names the argument, its value and what
/// is allowed; "" if it succeeded. Never NULL. The library's own, valid until this thread's next flashtune call that
/// returns a status. Any thread, any time.
#[unsafe(no_mangle)]
pub extern "C" fn flashtune_last_error() -> *const c_char {
    // A thread that is being torn down has no message any more.
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
        // A NUL inside would cut the sentence short.
        message.extend(text.bytes().filter(|byte| *byte != 0));
        message.push(0);
    });
}

pub(super) fn clear() {
    let _ = MESSAGE.try_with(|message| message.borrow_mut().clear());
}

#[cfg(test)]
pub(super) fn current() -> String {
    // SAFETY: the function gives a NUL-terminated string that lives until the next call on this thread.
    unsafe { std::ffi::CStr::from_ptr(flashtune_last_error()) }.to_str().unwrap().to_owned()
}
