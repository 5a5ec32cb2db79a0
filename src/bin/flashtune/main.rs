//! The command line: what an operator does with flashtune. One file for each command.
//!
//! Results go to standard output, progress and log lines to standard error. Exit codes: 0 done, 1 failed, 2 bad usage.

mod autotune;
mod bench;
mod device;
mod failure;
mod features;
mod info;
mod presets;
mod problems;
mod progress;
mod records;
mod render;
mod worker;

use clap::{Parser, Subcommand};
use failure::Failure;
use std::process::ExitCode;

/// Exact attention, rendered, compiled and tuned at run time.
#[derive(Parser)]
#[command(name = "flashtune", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measure the candidates for a list of problems and keep the winners
    Autotune(autotune::Args),
    /// Show devices, libraries, cache and versions
    Info(info::Args),
    /// Print or compile the kernels of a problem; no GPU is needed
    Render(render::Args),
    /// Print the kernel that merges partial results
    RenderMerge(render::MergeArgs),
    /// Print the kernel that writes new keys and values into a cache
    RenderKvAppend(render::KvAppendArgs),
    /// List, exchange and check records
    Records(records::Args),
    /// Time the plan of a problem
    Bench(bench::Args),
    /// Runs candidates for `autotune`, which starts it
    #[command(hide = true)]
    Worker(worker::Args),
}

fn main() -> ExitCode {
    // Our own warnings; a dependency's only where RUST_LOG asks for them.
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("flashtune=warn"))
        .format_timestamp(None)
        .init();
    let command = Cli::parse().command;
    // A reader that has seen enough (`| head`) ends this program quietly, where println would panic. Not `autotune`:
    // it writes to workers that may have crashed, and must survive that.
    if !matches!(command, Command::Autotune(_)) {
        // SAFETY: no other thread runs yet, and the default disposition installs no handler.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
    }
    let result = match command {
        Command::Autotune(args) => autotune::run(args),
        Command::Info(args) => info::run(args),
        Command::Render(args) => render::run(args),
        Command::RenderMerge(args) => render::run_merge(args),
        Command::RenderKvAppend(args) => render::run_kv_append(args),
        Command::Records(args) => records::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Worker(args) => worker::run(args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::Failed(message)) => {
            eprintln!("flashtune: {message}");
            ExitCode::from(1)
        }
        Err(Failure::Usage(message)) => {
            eprintln!("flashtune: {message}\nSee flashtune --help.");
            ExitCode::from(2)
        }
    }
}
