//! `flashtune worker`: the child of `autotune`, which runs what may hang or crash. Not for people.

use crate::device::DeviceArg;
use crate::failure::Failure;
use flashtune::error::Error;
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
    // The end of the input means that the parent is gone or wants no more. It ends this process whatever the main
    // thread waits for: a kernel that hangs must not outlive the run and keep the GPU.
    let read_questions = move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
        // Without exit handlers: those of CUDA and NVRTC free what the main thread may be using.
        // SAFETY: ends the process; what was answered was flushed line by line.
        unsafe { libc::_exit(0) }
    };
    std::thread::Builder::new().name("flashtune-questions".into()).spawn(read_questions).map_err(Error::from)?;
    let backend = args.device.open()?;
    Ok(worker::serve(&backend, questions.into_iter(), std::io::stdout())?)
}
