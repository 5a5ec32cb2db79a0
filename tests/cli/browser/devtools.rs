//! A headless Chromium, spoken to by the DevTools protocol over two pipes.
//!
//! The browser reads commands from descriptor 3 and writes answers and events to descriptor 4, as
//! JSON that ends with a zero byte. No port is opened.

use serde_json::{Value, json};
use std::collections::VecDeque;
use std::io::{BufRead, BufReader, PipeWriter, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

/// A busy machine starts a browser in some seconds.
const PATIENCE: Duration = Duration::from_secs(120);

const FLAGS: &[&str] = &[
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
];

/// The browser's program. None, with a line that says so, if there is none.
pub fn program() -> Option<PathBuf> {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let names = ["chromium", "chromium-browser", "google-chrome"];
    let mut places = std::env::split_paths(&folders).flat_map(|folder| names.map(|name| folder.join(name)));
    let found = places.find(|place| place.is_file());
    if found.is_none() {
        assert!(
            std::env::var_os("FLASHTUNE_REQUIRE_CHROMIUM").is_none(),
            "FLASHTUNE_REQUIRE_CHROMIUM=1, but no chromium"
        );
        eprintln!("SKIPPED: no chromium, so no browser has looked at a report");
    }
    found
}

/// The browser's command with an empty profile in the folder.
pub fn command(program: &Path, profile: &Path) -> Command {
    let mut command = Command::new(program);
    command.args(FLAGS).arg(format!("--user-data-dir={}", profile.join("profile").display()));
    // A browser that is killed leaves its temporary folders.
    command
        .env("HOME", profile)
        .env("TMPDIR", profile)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command
}

pub struct Browser {
    child: Child,
    commands: PipeWriter,
    messages: Receiver<Value>,
    next: u64,
    session: Option<String>,
    pub events: VecDeque<Value>,
    _profile: tempfile::TempDir,
}

impl Browser {
    /// Starts the browser with one empty page.
    pub fn start(program: &Path) -> Browser {
        let profile = tempfile::tempdir().unwrap();
        let (to_read, commands) = std::io::pipe().unwrap();
        let (answers, to_write) = std::io::pipe().unwrap();
        // Neither may be 3 or 4 itself, or the first dup2 would close the other.
        let (to_read, to_write) = (far_away(to_read.into()), far_away(to_write.into()));
        let (source, target) = (to_read.as_raw_fd(), to_write.as_raw_fd());
        let mut command = command(program, profile.path());
        command.arg("--remote-debugging-pipe").arg("about:blank");
        // SAFETY: dup2 may be called between fork and exec, and both descriptors are open.
        unsafe {
            command.pre_exec(move || match libc::dup2(source, 3) >= 0 && libc::dup2(target, 4) >= 0 {
                true => Ok(()),
                false => Err(std::io::Error::last_os_error()),
            });
        }
        let child = command.spawn().unwrap();
        drop((to_read, to_write));
        let (sender, messages) = mpsc::channel();
        std::thread::spawn(move || {
            for message in BufReader::new(answers).split(0).map_while(Result::ok) {
                if serde_json::from_slice(&message).is_ok_and(|message| sender.send(message).is_err()) {
                    break;
                }
            }
        });
        let events = VecDeque::new();
        let mut browser = Browser { child, commands, messages, next: 0, session: None, events, _profile: profile };
        let target = browser.call("Target.createTarget", json!({"url": "about:blank"}))["targetId"].clone();
        let attached = browser.call("Target.attachToTarget", json!({"targetId": target, "flatten": true}));
        browser.session = Some(attached["sessionId"].as_str().unwrap().to_owned());
        for domain in ["Page", "Runtime", "Log", "Network"] {
            browser.call(&format!("{domain}.enable"), json!({}));
        }
        browser
    }

    /// Calls a method of the protocol and returns its result. Events that come first are kept.
    pub fn call(&mut self, method: &str, params: Value) -> Value {
        self.next += 1;
        let mut message = json!({"id": self.next, "method": method, "params": params});
        if let Some(session) = &self.session {
            message["sessionId"] = json!(session);
        }
        self.commands.write_all(format!("{message}\0").as_bytes()).unwrap();
        loop {
            let answer = self.messages.recv_timeout(PATIENCE).unwrap_or_else(|error| panic!("{method}: {error}"));
            if answer["id"] == self.next {
                assert!(answer["error"].is_null(), "{method}: {answer}");
                return answer["result"].clone();
            }
            self.events.push_back(answer);
        }
    }

    /// The value of an expression in the page, whose policy does not concern it.
    pub fn evaluate(&mut self, expression: &str) -> Value {
        let params = json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let result = self.call("Runtime.evaluate", params);
        assert!(result["exceptionDetails"].is_null(), "{expression}: {result}");
        result["result"]["value"].clone()
    }

    /// Shows a file on a screen of this size and waits until it is drawn.
    pub fn show(&mut self, page: &Path, width: u32, height: u32, scheme: &str) {
        let metrics = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500});
        self.call("Emulation.setDeviceMetricsOverride", metrics);
        let features = json!([{"name": "prefers-color-scheme", "value": scheme}]);
        self.call("Emulation.setEmulatedMedia", json!({"features": features}));
        self.events.clear();
        let shown = self.call("Page.navigate", json!({"url": format!("file://{}", page.display())}));
        assert!(shown["errorText"].is_null(), "{shown}");
        while !self.events.iter().any(|event| event["method"] == "Page.loadEventFired") {
            let event = self.messages.recv_timeout(PATIENCE).expect("the page loads");
            self.events.push_back(event);
        }
        // Two frames: the first one may be drawn before the layout is.
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))");
    }

    /// A PNG of this part of the page.
    pub fn picture(&mut self, width: f64, y: f64, height: f64) -> Vec<u8> {
        let clip = json!({"x": 0, "y": y, "width": width, "height": height, "scale": 1});
        let params = json!({"format": "png", "clip": clip, "captureBeyondViewport": true});
        from_base64(self.call("Page.captureScreenshot", params)["data"].as_str().unwrap())
    }

    /// The events since the last call.
    pub fn take_events(&mut self) -> Vec<Value> {
        self.events.drain(..).collect()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn far_away(descriptor: OwnedFd) -> OwnedFd {
    use std::os::fd::FromRawFd;
    // SAFETY: the descriptor is open, and the new one belongs to nobody else.
    unsafe { OwnedFd::from_raw_fd(libc::fcntl(descriptor.as_raw_fd(), libc::F_DUPFD_CLOEXEC, 10)) }
}

fn from_base64(text: &str) -> Vec<u8> {
    let digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let (mut bytes, mut bits, mut count) = (Vec::new(), 0_u32, 0);
    for value in text.chars().map_while(|c| digits.find(c)) {
        (bits, count) = (bits << 6 | value as u32, count + 6);
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
        }
    }
    bytes
}
