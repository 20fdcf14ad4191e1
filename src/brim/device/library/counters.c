/* What Python asks the device afterwards: stubs that were called, memory that was used, hazards. */
#include "device.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- generated stubs ---- */
static Counter *called;

void count(Counter *counter) {
  lock();
  if (!counter->calls++) {
    counter->next = called;
    called = counter;
  }
  unlock();
}

/* const char *brim_device_stub(size_t index, uint64_t *calls): the index-th stub that was called, or NULL after the last. */
API const char *brim_device_stub(size_t index, uint64_t *calls) {
  lock();
  Counter *counter = called;
  while (counter && index--) counter = counter->next;
  if (counter) *calls = counter->calls;
  unlock();
  return counter ? counter->name : NULL;
}

/* ---- memory ---- */
API size_t brim_device_used_bytes(int device) {
  lock();
  size_t bytes = used_bytes(device);
  unlock();
  return bytes;
}
API size_t brim_device_peak_bytes(int device) {
  lock();
  size_t bytes = peak_used_bytes(device);
  unlock();
  return bytes;
}

/* ---- hazards ---- */
#define KEPT_HAZARDS 64

static char *hazards[KEPT_HAZARDS];
static size_t hazard_count;

void hazard(const char *format, ...) {
  char text[512];
  va_list values;
  va_start(values, format);
  vsnprintf(text, sizeof text, format, values);
  va_end(values);
  lock();
  if (hazard_count < KEPT_HAZARDS) hazards[hazard_count] = strdup(text);
  hazard_count++;
  unlock();
  fprintf(stderr, "brim: hazard: %s\n", text);
}

/* How many since the last reset; the text of the index-th, NULL beyond the 64 that are kept. */
API size_t brim_device_hazards(void) { return hazard_count; }
API const char *brim_device_hazard(size_t index) {
  return index < hazard_count && index < KEPT_HAZARDS ? hazards[index] : NULL;
}

/* ---- all of it anew: counts of launches and stubs, peaks, hazards ---- */
API void brim_device_reset(void) {
  lock();
  forget_launches();
  while (called) {
    called->calls = 0;
    called = called->next;
  }
  for (int device = 0; device < settings.installed; device++) reset_peak(device);
  for (size_t i = 0; i < hazard_count && i < KEPT_HAZARDS; i++) free(hazards[i]);
  hazard_count = 0;
  unlock();
}
