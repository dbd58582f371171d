"""Asynchronous pipelines: schedules, stages with stashed weights, a delay-exact simulator and the runtime."""
