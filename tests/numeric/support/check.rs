//! Runs one case on one backend with one config, in either pass, and judges it by the error rule.

use super::case::{Case, Data};
use super::error_rule::{CUT_OF_EIGHT_BITS, ROUNDING_OF_WIDENED_INT4, Rule, compare, compare_lse, step};
use super::reference::{self, Results};
use super::subject::{Forward, Gradients, Subject};
use flashtune::config::Config;
use flashtune::problem::{Dtype, Pass};
use rayon::prelude::*;

/// A bound in standard deviations for the sum of many roundings.
const SIX_DEVIATIONS: f64 = 6.0;

/// A case with its data and both references, which all configs share.
pub struct Prepared {
    pub case: Case,
    pub data: Data,
    pub exact: Results,
    pub naive: Results,
}

impl Prepared {
    pub fn new(case: &Case) -> Prepared {
        let data = Data::random(case);
        Prepared::with(case, data)
    }

    pub fn with(case: &Case, data: Data) -> Prepared {
        Prepared {
            exact: reference::exact(case, &data),
            naive: reference::naive(case, &data),
            case: case.clone(),
            data,
        }
    }

    /// `loses_bits`: fp32 products may lose what splitting them into two tf32 loses, and scores of
    /// 8-bit queries what `wgmma` cuts off.
    pub fn judge_forward(&self, loses_bits: bool, got: &Forward) -> Result<(), String> {
        self.judge_forward_of(loses_bits, 0.0, got)
    }

    /// The same for a config that may round int4 keys to bf16.
    pub fn judge_forward_with(&self, loses_bits: bool, config: &Config, got: &Forward) -> Result<(), String> {
        let rounds_keys = self.case.extras.four.is_some() && config.get("widens") == Some(1);
        self.judge_forward_of(loses_bits, if rounds_keys { ROUNDING_OF_WIDENED_INT4 } else { 0.0 }, got)
    }

    /// `rounding`: what scores may lose to rounded keys.
    fn judge_forward_of(&self, loses_bits: bool, rounding: f64, got: &Forward) -> Result<(), String> {
        let rule = self.rule(loses_bits, 2.0);
        let cut = if loses_bits && self.has_eight_bit_queries() { CUT_OF_EIGHT_BITS } else { 0.0 };
        let lost = cut + rounding;
        compare_lse(&got.lse, &self.exact.lse, self.exact.magnitudes.score, lost)?;
        compare("out", &got.out, &self.exact.out, &self.naive.out, rule)
    }

    pub fn judge_backward(&self, loses_bits: bool, got: &Gradients) -> Result<(), String> {
        let rule = |terms| Rule { terms, ..self.rule(loses_bits, 3.0) };
        let (exact, naive, magnitudes) = (&self.exact, &self.naive, &self.exact.magnitudes);
        compare("dv", &got.dv, &exact.dv, &naive.dv, rule(magnitudes.dv))?;
        compare("dk", &got.dk, &exact.dk, &naive.dk, rule(magnitudes.dk))?;
        compare("dq", &got.dq, &exact.dq, &naive.dq, rule(magnitudes.dq))?;
        // Bias and sink gradients are fp32 in every dtype. Each head has one sink gradient, whose
        // whole error comes from O rounded to the dtype.
        let fp32 = |terms| Rule { dtype: Dtype::Fp32, ..rule(terms) };
        compare("dbias", &got.dbias, &exact.dbias, &naive.dbias, fp32(magnitudes.dbias))?;
        let input_rounding = SIX_DEVIATIONS * step(self.case.dtype, 1.0) / 2.0 * magnitudes.dsinks_deviation;
        let of_sinks = Rule { input_rounding, ..fp32(magnitudes.dsinks) };
        compare("dsinks", &got.dsinks, &exact.dsinks, &naive.dsinks, of_sinks)
    }

    pub fn loses_bits(&self, subject: &Subject) -> bool {
        // The emulator multiplies 8 bits exactly.
        let cuts = self.has_eight_bit_queries() && std::env::var_os("FLASHTUNE_EMULATED").is_none();
        (self.case.dtype == Dtype::Fp32 || cuts) && subject.is_gpu()
    }

    fn has_eight_bit_queries(&self) -> bool {
        self.case.extras.eight.is_some_and(|eight| eight.queries)
    }

    fn rule(&self, loses_bits: bool, factor: f64) -> Rule {
        let is_split = loses_bits && self.case.dtype == Dtype::Fp32;
        Rule { dtype: self.case.dtype, factor, terms: 0.0, input_rounding: 0.0, is_split }
    }

    /// Runs the forward pass and judges it. A panic prints the line that reproduces the case.
    pub fn forward(&self, subject: &Subject, config: &Config) -> Forward {
        let got = subject.forward(&self.case, &self.data, config);
        self.expect(self.judge_forward_with(self.loses_bits(subject), config, &got), config);
        got
    }

    /// Runs the backward pass on a forward result and judges it.
    pub fn backward(&self, subject: &Subject, forward: &Forward, config: &Config) -> Gradients {
        let got = subject.backward(&self.case, &self.data, forward, config);
        self.expect(self.judge_backward(self.loses_bits(subject), &got), config);
        got
    }

    fn expect(&self, judgement: Result<(), String>, config: &Config) {
        if let Err(reason) = judgement {
            panic!("{reason}\n  config: {config}\n  reproduce: FLASHTUNE_TEST_CASE=\"{}\"", self.case);
        }
    }
}

/// Runs and judges the forward pass of each case with the heuristic's config.
pub fn are_right_forward(subject: &Subject, cases: &[Case]) {
    cases.par_iter().for_each(|case| {
        Prepared::new(case).forward(subject, &subject.heuristic(case, Pass::Forward));
    });
}
