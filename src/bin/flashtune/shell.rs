//! `flashtune completions` and `flashtune man`: what a shell and `man` know of this command line.
//!
//! Both follow from the definition of the arguments. `make install` calls them; packagers may too.

use crate::failure::Failure;
use clap::Command;
use clap_complete::Shell;
use std::io::Write as _;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct CompletionsArgs {
    /// Shell that reads the script
    shell: Shell,
}

#[derive(clap::Args)]
pub struct ManArgs {
    /// Existing folder for flashtune.1 and one page for each command
    folder: PathBuf,
}

pub fn completions(args: CompletionsArgs, mut command: Command) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "flashtune", &mut script);
    std::io::stdout().write_all(&script).map_err(|error| Failure::Failed(format!("standard output: {error}")))
}

pub fn man(args: ManArgs, command: Command) -> Result<(), Failure> {
    clap_mangen::generate_to(command, &args.folder)
        .map_err(|error| Failure::Failed(format!("{}: {error}", args.folder.display())))
}
