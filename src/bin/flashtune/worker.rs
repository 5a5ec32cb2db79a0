//! `flashtune worker`: the child process of `autotune`, which runs what may hang or crash. Users do
//! not call it.

use crate::device::DeviceArg;
use crate::failure::Failure;
use flashtune::error::{Error, Status};
use flashtune::tune::worker;
use std::io::BufRead;
use std::sync::mpsc;

#[derive(clap::Args)]
pub struct Args {
    #[arg(long)]
    device: DeviceArg,
}

pub fn run(args: Args) -> Result<(), Failure> {
    let (sender, questions) = mpsc::channel();
    // End of input means that the parent is gone or has finished. It must end this process whatever
    // the main thread waits for, so that a hanging kernel does not outlive the run and keep the
    // GPU.
    let read_questions = move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
        // Exit handlers are skipped: those of CUDA and NVRTC free memory that the main thread may
        // be using.
        // SAFETY: ends the process; every answer was flushed after its line.
        unsafe { libc::_exit(0) }
    };
    std::thread::Builder::new()
        .name("flashtune-questions".into())
        .spawn(read_questions)
        .map_err(|error| Error::new(Status::OutOfMemory, format!("cannot start a thread: {error}")))?;
    let backend = args.device.open()?;
    Ok(worker::serve(&backend, questions.into_iter(), std::io::stdout())?)
}
